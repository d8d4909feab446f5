"""What the page says of a job that does not train yet."""

from __future__ import annotations

from flashrecovery.config import RunConfig
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.observe.waits import waits
from flashrecovery.proto import flashrecovery_pb2 as pb


def test_nodes_that_have_not_come_are_waited_for_by_number_name_and_time() -> None:
    config = RunConfig(nproc_per_node=1, nnodes=3, controller="host:1", timeouts={"rendezvous_s": 600.0})
    job = JobState(config)
    assert waits(job, {}, 0.0, 1.0) == [], "not for long yet"
    for name in ("b", "a"):
        job.nodes[name] = NodeRecord.of(pb.Register(node=name, slots=1))
    (wait,) = waits(job, {}, 0.0, 5.0)
    assert wait.what == "1 of 3 nodes to come, for at most 600 s (timeouts.rendezvous_s); here: b and a"
    assert wait.seconds == 5.0
    job.nodes.clear()
    (wait,) = waits(job, {}, 0.0, 5.0)
    assert wait.what.startswith("3 of 3 nodes to come") and wait.what.endswith("here: none")
