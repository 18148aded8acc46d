"""The files for Kubernetes and SkyPilot in examples/: the published schemas take them, and their commands run.

No cluster is needed: the processes get the variables that Kubernetes, Trainer and SkyPilot set for each pod.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jsonschema import Draft202012Validator
from PIL import Image

from engines.published_schemas import load_schema
from processes import LONG_RUN_ARG, TINY_RUN_ARGS, free_port, wait_for_step

EXAMPLES = Path(__file__).parents[2] / "examples"
DEFAULT_LANES = 8
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
FREE_NAMES = {"labels", "requests", "limits", "volumes"}  # the file chooses the keys of these
TINY = [*TINY_RUN_ARGS[1:], LONG_RUN_ARG, "--data.resolution=8"]

UNSHARE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def has_pid_namespaces() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run([*UNSHARE, "true"], capture_output=True).returncode


# Files and schemas --------------------------------------------------------------------------------------------


def read_objects(*names: str) -> dict[str, dict[str, Any]]:
    """Return the objects in files of examples/kubernetes by kind."""
    objects: dict[str, dict[str, Any]] = {}
    for name in names:
        for document in yaml.safe_load_all((EXAMPLES / "kubernetes" / f"{name}.yaml").read_text()):
            objects[document["kind"]] = document
    return objects


OBJECTS = read_objects("storage", "jobset", "trainjob")
SKYPILOT = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())


def claim_schema() -> dict[str, Any]:
    """Return the schema of a PersistentVolumeClaim: pods have it as that of an ephemeral volume."""
    jobset = load_schema("JobSet")["properties"]["spec"]["properties"]["replicatedJobs"]["items"]
    pod = jobset["properties"]["template"]["properties"]["spec"]["properties"]["template"]["properties"]["spec"]
    volume = pod["properties"]["volumes"]["items"]["properties"]
    claim = volume["ephemeral"]["properties"]["volumeClaimTemplate"]["properties"]["spec"]
    fields = {"apiVersion": {"const": "v1"}, "kind": {"const": "PersistentVolumeClaim"}, "spec": claim}
    fields["metadata"] = load_schema("JobSet")["properties"]["metadata"]
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


CHECKED = {  # name -> (schema, what it is about)
    **{kind: (load_schema(kind), OBJECTS[kind]) for kind in ("JobSet", "TrainingRuntime", "TrainJob")},
    "PersistentVolumeClaim": (claim_schema(), OBJECTS["PersistentVolumeClaim"]),
    "task of SkyPilot": (load_schema("task"), {key: value for key, value in SKYPILOT.items() if key != "resources"}),
    "resources of SkyPilot": (load_schema("resources"), SKYPILOT["resources"]),
}
each_object = pytest.mark.parametrize("name", CHECKED)


def list_errors(name: str, value: Any) -> list[str]:
    errors = Draft202012Validator(CHECKED[name][0]).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in errors]


def iter_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every field whose name the schema knows."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not path or path[-1] not in FREE_NAMES:
                yield (*path, key)
            yield from iter_paths(part, (*path, key))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from iter_paths(part, (*path, number))


def container_of(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


@each_object
def test_published_schemas_take_the_files(name):
    assert list_errors(name, CHECKED[name][1]) == []


@each_object
def test_each_misspelt_field_is_refused(name):
    value = CHECKED[name][1]
    paths = list(iter_paths(value))
    assert paths
    for path in paths:
        mutated = copy.deepcopy(value)
        holder = container_of(mutated, path)
        holder[f"{path[-1]}x"] = holder.pop(path[-1])
        assert list_errors(name, mutated), path


@each_object
def test_each_field_of_another_type_is_refused(name):
    value = CHECKED[name][1]
    for path in iter_paths(value):
        mutated = copy.deepcopy(value)
        holder = container_of(mutated, path)
        holder[path[-1]] = 1.5 if isinstance(holder[path[-1]], dict | list | str) else {"x": [1.5]}
        assert list_errors(name, mutated), path


# What the fields say together ---------------------------------------------------------------------------------


def job_of(owner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one replicated job of a JobSet or of a TrainingRuntime."""
    spec = owner["spec"] if "replicatedJobs" in owner["spec"] else owner["spec"]["template"]["spec"]
    (job,) = spec["replicatedJobs"]
    return job


def pod_of(owner: Mapping[str, Any]) -> dict[str, Any]:
    return job_of(owner)["template"]["spec"]["template"]["spec"]


def container_spec(owner: Mapping[str, Any]) -> dict[str, Any]:
    (container,) = pod_of(owner)["containers"]
    return container


@pytest.mark.parametrize("kind", ["JobSet", "TrainingRuntime"])
def test_pods_have_the_volumes_and_the_policy_that_failures_need(kind):
    job = job_of(OBJECTS[kind])["template"]["spec"]
    pod, container = pod_of(OBJECTS[kind]), container_spec(OBJECTS[kind])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert (
        mounts["/shared"]["persistentVolumeClaim"]["claimName"] == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
    )
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert OBJECTS["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy requires
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (0, "Failed")
    for rule in job["podFailurePolicy"]["rules"]:
        assert rule.get("onExitCodes", {}).get("containerName", container["name"]) == container["name"]


def test_numbers_of_a_jobset_agree():
    jobset = OBJECTS["JobSet"]
    job = job_of(jobset)
    env = {variable["name"]: variable for variable in container_spec(jobset)["env"]}
    size = int(env["WORLD_SIZE"]["value"])
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == size <= DEFAULT_LANES
    name = jobset["metadata"]["name"]
    assert env["MASTER_ADDR"]["value"] == f"{name}-{job['name']}-0-0.{name}"
    assert env["RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == COMPLETION_INDEX


def test_numbers_of_a_trainjob_agree():
    job, runtime = OBJECTS["TrainJob"]["spec"], OBJECTS["TrainingRuntime"]
    assert (job["runtimeRef"]["kind"], job["runtimeRef"]["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    trainer = job["trainer"]
    assert trainer["numNodes"] * trainer["numProcPerNode"] <= DEFAULT_LANES
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    # Trainer looks for this label and this name
    assert job_of(runtime)["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert container_spec(runtime)["name"] == job_of(runtime)["name"] == "node"
    (variable,) = container_spec(runtime)["env"]
    assert variable["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    assert 30 < int(variable["value"]) < pod_of(runtime)["terminationGracePeriodSeconds"]


def pod_failure_message(job: Mapping[str, Any], status: int, disrupted: bool) -> str:
    """Return why Kubernetes fails a Job whose pod ended: the message of PodFailurePolicy, "" for BackoffLimitExceeded.

    As in pkg/controller/job/pod_failure_policy.go of Kubernetes.
    """
    for index, rule in enumerate(job["template"]["spec"]["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        if status in rule.get("onExitCodes", {}).get("values", ()):
            return f"Container c for pod n/p failed with exit code {status} matching FailJob rule at index {index}"
        if disrupted and any(condition["type"] == "DisruptionTarget" for condition in rule.get("onPodConditions", ())):
            return f"Pod n/p has condition DisruptionTarget matching FailJob rule at index {index}"
    return ""


def jobset_action(owner: Mapping[str, Any], status: int, disrupted: bool = False) -> str:
    """Return what JobSet does when a pod ended, as in pkg/controllers/failure_policy.go of JobSet."""
    spec = owner["spec"] if "failurePolicy" in owner["spec"] else owner["spec"]["template"]["spec"]
    message = pod_failure_message(job_of(owner), status, disrupted)
    reason = "PodFailurePolicy" if message else "BackoffLimitExceeded"
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("kind", "status", "disrupted", "action"),
    [
        ("JobSet", 2, False, "FailJobSet"),
        ("JobSet", 2, True, "FailJobSet"),
        ("JobSet", 3, False, "RestartJobSetAndIgnoreMaxRestarts"),
        ("JobSet", 3, True, "RestartJobSetAndIgnoreMaxRestarts"),
        ("JobSet", 137, True, "RestartJobSetAndIgnoreMaxRestarts"),
        ("JobSet", 137, False, "RestartJobSet"),
        ("JobSet", 1, False, "RestartJobSet"),
        ("TrainingRuntime", 1, False, "RestartJobSet"),  # torchrun, whatever the status of its ranks
        ("TrainingRuntime", 1, True, "RestartJobSetAndIgnoreMaxRestarts"),
    ],
)
def test_what_is_started_again(kind, status, disrupted, action):
    assert jobset_action(OBJECTS[kind], status, disrupted) == action


def test_skypilot_recovers_what_was_stopped():
    assert SKYPILOT["resources"]["job_recovery"]["recover_on_exit_codes"] == [3]
    assert SKYPILOT["num_nodes"] <= DEFAULT_LANES


# Commands -----------------------------------------------------------------------------------------------------


class Pods:
    """Processes with the commands of pods, in one process group each."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder = folder
        self._stack = stack
        self._started = 0

    def start(self, commands: list[list[str]], variables: list[dict[str, str]]) -> list[subprocess.Popen[bytes]]:
        pods = []
        for command, env in zip(commands, variables, strict=True):
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            log = (self.folder / f"pod{self._started}.log").open("wb")
            self._started += 1
            pod = subprocess.Popen(
                command, env=os.environ | {"PATH": path} | env, stdout=log, stderr=log, start_new_session=True
            )
            log.close()
            self._stack.callback(_end, pod)
            pods.append(pod)
        return pods

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("pod*.log")))


def _end(pod: subprocess.Popen[bytes]) -> None:
    if pod.poll() is None:
        os.killpg(pod.pid, signal.SIGKILL)
    pod.wait(60)


def write_photos(folder: Path) -> None:
    (folder / "photos").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (32, 8, 8, 3), np.uint8)):
        Image.fromarray(pixels).save(folder / "photos" / f"{number:02}.png")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Start processes, where /shared is `tmp_path`, and has images."""
    write_photos(tmp_path)
    with ExitStack() as stack:
        yield Pods(tmp_path, stack)


@pytest.fixture(scope="module")
def model_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of the same run on two ranks that nobody stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_photos(folder)
    arguments = ["train", "folder", f"--data={folder}/photos", f"--run-dir={folder}/run", *TINY, "--ranks=2"]
    subprocess.run([sys.executable, "-m", "paragan", *arguments], check=True, capture_output=True, timeout=300)
    return (folder / "run" / "model" / "model.safetensors").read_bytes()


def localize(words: list[str], folder: Path) -> list[str]:
    """Return a command of an example with the shared storage in a folder, for a tiny run."""
    return [word.replace("/shared", str(folder)) for word in words] + TINY


def check_stop_and_resume(
    pods: Pods, commands: list[list[str]], variables: list[list[dict[str, str]]], stopped: int, model: bytes
) -> None:
    """Start a run, stop one pod, expect the status `stopped` of all, start it again, and expect this model.

    variables: [starts, pods]; a second start has another port, as the first one's may still be in use
    """
    first = pods.start(commands, variables[0])
    wait_for_step(pods.folder / "run")
    first[-1].send_signal(signal.SIGTERM)  # what a pod gets when its node is drained
    assert [pod.wait(200) for pod in first] == [stopped] * len(first), pods.output()
    assert "the same command resumes the run" in pods.output()
    again = pods.start(commands, variables[1])
    assert [pod.wait(300) for pod in again] == [0] * len(again), pods.output()
    assert (pods.folder / "run" / "model" / "model.safetensors").read_bytes() == model


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pods_of_the_jobset_train_one_run_and_resume(pods, model_of_two_ranks):
    container = container_spec(OBJECTS["JobSet"])
    size = job_of(OBJECTS["JobSet"])["template"]["spec"]["completions"]

    def variables(index: int, port: int) -> dict[str, str]:
        fields = {COMPLETION_INDEX: str(index)}
        env = {
            entry["name"]: entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in container["env"]
        }
        return {**env, "JOB_COMPLETION_INDEX": str(index), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    commands = [localize(container["command"], pods.folder)] * size
    starts = [[variables(index, port) for index in range(size)] for port in (free_port(), free_port())]
    check_stop_and_resume(pods, commands, starts, stopped=3, model=model_of_two_ranks)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_of_the_trainjob_train_one_run_and_resume(pods, model_of_two_ranks):
    trainer = OBJECTS["TrainJob"]["spec"]["trainer"]
    (fixed,) = container_spec(OBJECTS["TrainingRuntime"])["env"]
    size = trainer["numNodes"]

    def variables(index: int, port: int) -> dict[str, str]:
        """As pkg/runtime/framework/plugins/torch/torch.go of Trainer sets them, but for one process a node."""
        env = {"PET_NNODES": str(size), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
        return {**env, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), fixed["name"]: fixed["value"]}

    commands = [localize([*trainer["command"], *trainer["args"]], pods.folder)] * size
    starts = [[variables(index, port) for index in range(size)] for port in (free_port(), free_port())]
    check_stop_and_resume(pods, commands, starts, stopped=1, model=model_of_two_ranks)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_of_skypilot_train_one_run_and_resume(pods, model_of_two_ranks):
    size = SKYPILOT["num_nodes"]
    script = SKYPILOT["run"].strip().replace("/shared", str(pods.folder)) + " " + " ".join(map(repr, TINY))
    scripts = [script.replace("MASTER_PORT=29500", f"MASTER_PORT={free_port()}") for _ in range(2)]
    assert script not in scripts
    variables = [
        {
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(size),
            "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * size),
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        }
        for rank in range(size)
    ]
    commands = [["bash", "-c", scripts[0]]] * size
    check_stop_and_resume(pods, commands, [variables, variables], stopped=3, model=model_of_two_ranks)


@pytest.mark.skipif(not has_pid_namespaces(), reason="a user may not make a PID namespace here")
def test_sigterm_reaches_paragan_as_process_1(pods):
    command = localize(container_spec(OBJECTS["JobSet"])["command"], pods.folder)
    (parent,) = pods.start([[*UNSHARE, *command]], [{}])
    wait_for_step(pods.folder / "run")
    (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)
    assert parent.wait(200) == 3, pods.output()
