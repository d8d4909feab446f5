"""``flashrecovery doctor``: what hinders is named with its cure, and only the impossible fails."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashrecovery.capabilities import Framework, capability
from flashrecovery.capabilities.finding import Finding, Level
from flashrecovery.capabilities.probes import Live
from flashrecovery.cli import checks
from flashrecovery.cli.doctor import doctor, examine, summary
from flashrecovery.groups import accelerator


def levels(findings: list[Finding]) -> list[Level]:
    return [f.level for f in findings]


def test_this_machine_can_recover() -> None:
    """Whatever may warn here, the tests themselves need all that would fail."""
    findings = list(examine())
    assert Level.FAIL not in levels(findings)
    assert {"python", "torch", "backend", "grpc", "/proc", "pidfd", "memfd"} <= {f.check for f in findings}
    for f in findings:
        assert f.found and f.meaning
        assert f.advice or f.level is Level.OK


@pytest.mark.parametrize(("level", "code"), [(Level.OK, 0), (Level.WARN, 0), (Level.FAIL, 1)])
def test_exit_code_and_json(monkeypatch: pytest.MonkeyPatch, level: Level, code: int) -> None:
    found = Finding("x", level, "found [this]", "means that", "do this")
    monkeypatch.setattr("flashrecovery.cli.doctor.examine", lambda build, nccl: iter([found]))
    result = CliRunner().invoke(doctor, ["--json"])
    assert result.exit_code == code
    assert json.loads(result.output) == [
        {"check": "x", "level": level.value, "found": "found [this]", "meaning": "means that", "advice": "do this"}
    ]
    text = CliRunner().invoke(doctor, []).output
    assert "found [this]" in text and "-> do this" in text


def test_missing_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda name: None)
    (finding,) = checks.torch_version()
    assert finding.level is Level.FAIL and finding.advice == "install torch"
    assert not any(f.check in ("backend", "compiler") for f in examine())


def test_untested_torch_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda name: "2.13.99")
    first, *capabilities = checks.torch_version()
    assert first.level is Level.WARN and set(levels(capabilities)) == {Level.OK}


def test_each_capability_has_a_line() -> None:
    there = capability("sums", "numbers are added", Live("math", ("fsum",)))
    without = capability("magic", "things are done", Live("math", ("wand",)), otherwise="they are done by hand")
    needed = capability("more magic", "other things are done", Live("math", ("wand", "pi")))
    framework = Framework("Python", "no-such-distribution", "math", ("3",), (there, without, needed))
    first, second, third = checks.capabilities(framework, needed=True)
    assert (first.level, first.check, first.meaning) == (Level.OK, "Python: sums", "numbers are added")
    assert second.level is Level.OK and "they are done by hand" in second.found
    assert third.level is Level.FAIL and third.found == "no math.wand"
    assert levels(checks.capabilities(framework, needed=False))[2] is Level.WARN


def test_frameworks_are_listed_by_their_capabilities() -> None:
    found = {f.check for f in checks.frameworks()}
    assert any(name.startswith("DeepSpeed") for name in found) and any(
        name.startswith("megatron-core") for name in found
    )


def test_no_compiler_matters_only_while_the_backend_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert levels(checks.compiler(built=True)) == [Level.WARN]
    (finding,) = checks.compiler(built=False)
    assert finding.level is Level.FAIL and "apt install" in finding.advice


def test_backend_without_compiler_or_cache_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FLASHRECOVERY_CACHE", str(tmp_path))
    (unbuilt,) = checks.backend(False, lambda line: None)
    assert unbuilt.level is Level.WARN and unbuilt.advice == "flashrecovery doctor --build"
    (failed,) = checks.backend(True, lambda line: None)
    assert failed.level is Level.FAIL and "no-such-compiler" in failed.found


def test_who_waits_before_an_optimizer_is_said_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path("/dev/nvidiactl").exists() or checks.barrier() == []
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(accelerator, "_DRIVER", "libm.so.6")
    (found,) = checks.barrier()
    assert "the host waits" in found.found and "the driver has no cuStreamWaitValue32_v2" in found.meaning
    monkeypatch.setattr(accelerator, "_DRIVER", "libnone.so.1")
    assert "the driver cannot be called" in checks.barrier()[0].meaning
    monkeypatch.setattr(accelerator, "_DRIVER", "libm.so.6")
    monkeypatch.setattr(accelerator, "_WAIT", "sin")
    monkeypatch.setattr(accelerator, "_ADDRESS", "cos")
    assert "AdamW" in checks.barrier()[0].found
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "CUDA_LAUNCH_BLOCKING" in checks.barrier()[0].meaning


def test_nccl_is_looked_at_only_where_it_matters() -> None:
    forced = checks.nccl({"TORCH_NCCL_PROPAGATE_ERROR": "1"}, wanted=True)
    assert any(f.level is Level.WARN and f.found == "TORCH_NCCL_PROPAGATE_ERROR=1" for f in forced)
    assert not any("ASYNC_ERROR_HANDLING" in f.found for f in forced)  # the launcher sets it
    (free,) = [f for f in checks.nccl({"NCCL_PROTO": "Simple"}, wanted=True) if "NCCL_ALGO" in f.found]
    assert (
        free.level is Level.OK and free.found == "NCCL_ALGO, NCCL_NVLS_ENABLE (unset)" and "equal bits" in free.advice
    )
    if not Path("/dev/nvidiactl").exists():
        assert levels(checks.nccl({}, wanted=False)) == [Level.OK]


def test_gloo_interface() -> None:
    assert levels(checks.own_name({"GLOO_SOCKET_IFNAME": "lo"})) == [Level.OK]
    (finding,) = checks.own_name({"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert finding.level is Level.FAIL and "lo" in finding.advice


def test_host_without_an_address_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert levels(checks.own_name({})) == [Level.WARN]


@pytest.mark.parametrize(
    ("soft", "level"), [(100, Level.FAIL), (1024, Level.WARN), (65536, Level.OK), (resource.RLIM_INFINITY, Level.OK)]
)
def test_limits(monkeypatch: pytest.MonkeyPatch, soft: int, level: Level) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
    findings = checks.limits()
    assert levels(findings) == [level, level]
    assert level is Level.OK or {f.advice for f in findings} == {"ulimit -n 4096", "ulimit -u 4096"}


@pytest.mark.parametrize(
    ("text", "level"), [(None, Level.OK), ("1", Level.OK), ("4,2", Level.OK), ("64", Level.WARN), ("all", Level.WARN)]
)
def test_threads(text: str | None, level: Level) -> None:
    environment = {} if text is None else {"OMP_NUM_THREADS": text}
    assert levels(checks.threads(environment, cpus=8)) == [level]


def test_little_memory_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_memory", lambda: 1 << 30)
    assert checks.memory()[0].level is Level.WARN


def test_grpc_connects_whatever_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert levels(checks.grpc_loopback()) == [Level.OK]


def test_grpc_without_loopback_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc

    class Never:
        def result(self, timeout: float) -> None:
            raise grpc.FutureTimeoutError

    monkeypatch.setattr(grpc, "channel_ready_future", lambda channel: Never())
    assert levels(checks.grpc_loopback()) == [Level.FAIL]


def test_the_summary_has_every_warning_and_one_line_for_what_is_well() -> None:
    ok = [Finding(f"torch{name}", Level.OK, found, "what it means") for name, found in (("", "2.13"), (": a", "there"))]
    warning = Finding("torch: b", Level.WARN, "missing", "it is refused", "take another version")
    health = [Finding(f"health: {name}", Level.OK, "active", "watches") for name in ("host", "nvidia")]
    found = list(summary([*ok, warning, *health]))
    assert [(f.check, f.level, f.found) for f in found] == [
        ("torch", Level.OK, "2.13, 1 check of its inside"),
        ("torch: b", Level.WARN, "missing"),
        ("health", Level.OK, "2 checks"),
    ]
    assert found[1] is warning
