"""The example's Kubernetes manifests: against the schemas of what reads them, and against each other."""

from __future__ import annotations

import copy
import http.server
import importlib.util
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrecovery.config import load_run_config

ROOT = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "kubernetes"
KUBERNETES = "1.33"
"""The oldest version that the manifests are for."""
OWN_KINDS = ("JobSet", "TrainingRuntime", "TrainJob", "Kustomization")


def _documents() -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for path in sorted(ROOT.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if "kind" in document and document["kind"] != "Kustomization":
                found[document["kind"], document["metadata"]["name"]] = document
    return found


DOCUMENTS = _documents()
JOBSET = DOCUMENTS["JobSet", "gpt"]["spec"]
RUNTIME = DOCUMENTS["TrainingRuntime", "flashrecovery"]["spec"]
TRAINJOB = DOCUMENTS["TrainJob", "gpt"]["spec"]
SETTINGS = load_run_config(ROOT / "common" / "job.yaml", {})


def _job(jobset: dict[str, Any], name: str) -> dict[str, Any]:
    """The spec of one of its jobs."""
    (found,) = (job["template"]["spec"] for job in jobset["replicatedJobs"] if job["name"] == name)
    return found


def _pod(name: str) -> dict[str, Any]:
    return _job(JOBSET, name)["template"]["spec"]


# -- schemas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k for k in DOCUMENTS if k[0] not in OWN_KINDS], ids="/".join)
def test_core_objects_match_the_schema_of_kubernetes(key: tuple[str, str]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra 'test' has it")
    kubernetes_validate.validate(DOCUMENTS[key], KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["controller", "node"])
def test_jobs_match_the_schema_of_kubernetes(name: str) -> None:
    """The JobSet's own schema says little of a pod; that of a Job says all."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra 'test' has it")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": _job(JOBSET, name)}
    kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_an_unknown_field_does_not_match() -> None:
    """The check above finds what it is there to find."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra 'test' has it")
    spec = copy.deepcopy(_job(JOBSET, "node"))
    spec["template"]["spec"]["restartpolicy"] = "Never"
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": spec}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def _check_model(name: str, document: dict[str, Any]) -> None:
    """The model reads the document, and nothing is lost on the way: every field is known, and of the right type."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="the extra 'test' has it")
    given = json.loads(json.dumps(document))
    read = getattr(models, name).from_dict(given).to_dict()
    assert not list(_lost(given, json.loads(json.dumps(read)), ""))


def _lost(given: Any, read: Any, path: str) -> Iterator[str]:
    """What of ``given`` is not in ``read``, which may have defaults besides."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            yield from _lost(value, read.get(key), f"{path}/{key}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from _lost(one, other, f"{path}[{number}]")
    elif given != read:
        yield f"{path}: {given!r} is read as {read!r}"


def test_the_jobset_matches_its_api() -> None:
    _check_model("JobsetV1alpha2JobSetSpec", JOBSET)


def test_what_the_jobset_api_does_not_know_is_found() -> None:
    given = copy.deepcopy(JOBSET)
    given["successPolicy"]["targetJobs"] = ["controller"]
    with pytest.raises(AssertionError, match="targetJobs"):
        _check_model("JobsetV1alpha2JobSetSpec", given)


def test_the_runtime_matches_its_api() -> None:
    _check_model("TrainerV1alpha1TrainingRuntime", DOCUMENTS["TrainingRuntime", "flashrecovery"])


def test_the_trainjob_matches_its_api() -> None:
    _check_model("TrainerV1alpha1TrainJob", DOCUMENTS["TrainJob", "gpt"])


# -- each other ---------------------------------------------------------------------------------------


def test_the_numbers_agree() -> None:
    nodes = SETTINGS.nnodes + SETTINGS.spare_nodes
    node = _job(JOBSET, "node")
    assert node["completions"] == node["parallelism"] == nodes
    assert RUNTIME["mlPolicy"]["numNodes"] == TRAINJOB["trainer"]["numNodes"] == nodes
    budget = DOCUMENTS["PodDisruptionBudget", "gpt"]["spec"]
    assert budget["minAvailable"] == nodes + 1 - 1
    gpus = _pod("node")["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(gpus) == SETTINGS.nproc_per_node


def test_the_runtime_is_the_jobset() -> None:
    """But for Trainer's label, and the script, which the TrainJob brings."""
    runtime = copy.deepcopy(RUNTIME["template"]["spec"])
    (node,) = (job for job in runtime["replicatedJobs"] if job["name"] == "node")
    assert node["template"].pop("metadata")["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    container = node["template"]["spec"]["template"]["spec"]["containers"][0]
    container["args"] = TRAINJOB["trainer"]["args"]
    assert runtime == JOBSET
    assert container["name"] == "node", "Trainer fills in the container of this name"
    assert TRAINJOB["runtimeRef"] == {"kind": "TrainingRuntime", "name": "flashrecovery"}


@pytest.mark.parametrize("name", ["controller", "node"])
def test_what_a_pod_names_is_there(name: str) -> None:
    pod = _pod(name)
    assert ("ServiceAccount", pod["serviceAccountName"]) in DOCUMENTS
    generated = yaml.safe_load((ROOT / "common" / "kustomization.yaml").read_text())["configMapGenerator"]
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert volume["configMap"]["name"] in [g["name"] for g in generated]
        if "persistentVolumeClaim" in volume:
            assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in DOCUMENTS
    volumes = {v["name"] for v in pod["volumes"]}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        assert {m["name"] for m in container["volumeMounts"]} <= volumes
    token = SETTINGS.token_file
    assert token is not None
    mounted = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    assert mounted[str(token.parent)] == "token" and mounted["/etc/flashrecovery"] == "flashrecovery"
    assert SETTINGS.run_dir is not None and SETTINGS.run_dir.is_relative_to("/runs") and "/runs" in mounted


def test_only_the_init_container_may_ask_the_api() -> None:
    role = DOCUMENTS["ClusterRole", "flashrecovery-node-domain"]["rules"]
    assert role == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    for name in ("controller", "node"):
        pod = _pod(name)
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert "api" not in {m["name"] for m in container["volumeMounts"]}
    assert "serviceAccountToken" not in json.dumps(_pod("controller"))


def test_selectors_match_the_pods() -> None:
    """JobSet labels each pod with the names of the set and of the job."""
    labels = {"jobset.sigs.k8s.io/jobset-name": "gpt"}
    assert DOCUMENTS["NetworkPolicy", "gpt"]["spec"]["podSelector"]["matchLabels"] == labels
    assert DOCUMENTS["PodDisruptionBudget", "gpt"]["spec"]["selector"]["matchLabels"] == labels
    controller = {**labels, "jobset.sigs.k8s.io/replicatedjob-name": "controller"}
    service = DOCUMENTS["Service", "gpt-controller"]["spec"]
    assert service["selector"] == controller
    assert SETTINGS.controller == f"gpt-controller:{service['ports'][0]['port']}"
    assert f":{service['ports'][0]['port']}" in _pod("controller")["containers"][0]["args"][-1]


@pytest.mark.parametrize("domain", ["zone-b.rack-17", ""])
def test_the_command_of_a_node(domain: str, tmp_path: Path) -> None:
    """The pod's shell line, with a stand-in for `flashrecovery`."""
    container = _pod("node")["containers"][0]
    shell = list(container["command"])
    (tmp_path / "domain").write_text(domain)
    shell[2] = shell[2].replace("/run/flashrecovery/domain", str(tmp_path / "domain"))
    program = tmp_path / "flashrecovery"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_NAME": "gpt-node-0-1-x7k2p", "POD_IP": "10.1.2.3"}
    env["JOB_COMPLETION_INDEX"] = "1"
    done = subprocess.run([*shell, *container["args"]], env=env, capture_output=True, text=True, check=True)
    expected = ["run", "--config", "/etc/flashrecovery/job.yaml", "--node-name", "gpt-node-0-1-x7k2p"]
    expected += ["--node-rank", "1", "--node-address", "10.1.2.3"]
    expected += ["--failure-domain", domain] if domain else []
    assert done.stdout.splitlines() == [*expected, *container["args"]]


@pytest.mark.parametrize("ending", ["0", "1", "TERM"])
def test_the_command_of_the_controller(ending: str, tmp_path: Path) -> None:
    """Its exit code is the container's; when the pod is to go, it is killed, and ends nothing."""
    container = _pod("controller")["containers"][0]
    told = tmp_path / "told"
    program = tmp_path / "flashrecovery"
    last = "while :; do sleep 0.1; done" if ending == "TERM" else f"exit {ending}"
    tell = f'printf "%s\\n" "$@" > {told}.part; mv {told}.part {told}'  # there as a whole or not at all
    program.write_text(f'#!/bin/sh\ntrap "echo stopped >> {told}" TERM\n{tell}\n{last}\n')
    program.chmod(0o755)
    command = [*container["command"], *container["args"]]
    with subprocess.Popen(command, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}) as shell:
        if ending == "TERM":
            while not told.exists():
                time.sleep(0.01)
            shell.terminate()
        code = shell.wait(10)
    assert code == (143 if ending == "TERM" else int(ending))
    assert told.read_text().splitlines() == ["controller", *container["args"]]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the kustomizations")
@pytest.mark.parametrize("folder", ["jobset", "trainer"])
def test_kustomize_renders_everything(folder: str) -> None:
    done = subprocess.run(["kubectl", "kustomize", str(ROOT / folder)], capture_output=True, text=True, check=True)
    kinds = {document["kind"] for document in yaml.safe_load_all(done.stdout)}
    own = {"JobSet"} if folder == "jobset" else {"TrainingRuntime", "TrainJob"}
    assert kinds == {k for k, _ in DOCUMENTS if k not in OWN_KINDS} | own | {"ConfigMap"}


# -- the failure domain of a node ---------------------------------------------------------------------


class _Api(http.server.BaseHTTPRequestHandler):
    """As much of the API server as is asked for."""

    labels = {"topology.kubernetes.io/zone": "zone-b", "topology.kubernetes.io/rack": "rack-17"}  # noqa: RUF012

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer the-token-of-the-account"
        found = self.path == "/api/v1/nodes/machine-3"
        self.send_response(200 if allowed and found else 403)
        self.end_headers()
        if allowed and found:
            self.wfile.write(json.dumps({"metadata": {"name": "machine-3", "labels": self.labels}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path) -> Iterator[int]:
    """Its port. The certificate authority and the token are where an account has them."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "ca.crt")]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "token").write_text("the-token-of-the-account\n")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def _ask(port: int, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    (variables,) = (c["env"] for c in _pod("node")["initContainers"])
    labels = next(v["value"] for v in variables if v["name"] == "DOMAIN_LABELS")
    env = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port), "ACCOUNT_DIR": str(folder)}
    env |= {"NODE_NAME": "machine-3", "DOMAIN_LABELS": labels, "DOMAIN_FILE": str(folder / "domain"), **changes}
    script = ROOT / "common" / "node_domain.py"
    return subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)


def test_the_domain_of_a_node(api: int, tmp_path: Path) -> None:
    done = _ask(api, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "domain").read_text() == "zone-b.rack-17"


def test_a_node_without_the_label(api: int, tmp_path: Path) -> None:
    """Then it is its own failure domain."""
    assert _ask(api, tmp_path, DOMAIN_LABELS="example.com/switch").returncode == 0
    assert (tmp_path / "domain").read_text() == ""


def test_a_refusal_is_an_error(api: int, tmp_path: Path) -> None:
    """The pod shows it, instead of training without failure domains."""
    (tmp_path / "token").write_text("another one")
    done = _ask(api, tmp_path)
    assert done.returncode != 0 and "403" in done.stderr
    assert not (tmp_path / "domain").exists()


def test_schema_libraries_are_in_the_extra() -> None:
    """Skipped checks check nothing."""
    if os.environ.get("CI") != "true":
        pytest.skip("only where everything is installed")
    assert importlib.util.find_spec("kubernetes_validate") and importlib.util.find_spec("kubeflow_trainer_api")
