"""The Kubernetes manifests: valid by the schemas, strict about rights, and gentle when they stop a worker."""

import re
import shutil
import subprocess
from functools import cache
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # ships no types
import pytest
import yaml

from pipeline.config import TIME_LIMIT_GRACE, Settings
from tests.acceptance.test_liveness import PROBE
from tests.deploy import promql
from tests.deploy.known_names import DEPLOY, document, documents, metrics

KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed; it puts the overlays together")
PLACE = DEPLOY / "kubernetes"
FILES = sorted(path for path in PLACE.rglob("*.yaml") if path.name != "kustomization.yaml")
#: Versions that are in use; the newest that is known is tried too.
VERSIONS = ["1.31", kubernetes_validate.latest_version()]
Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    """What is written down, before it is put together."""
    return [each for path in FILES for each in documents(path.read_text())]


@cache
def built(overlay: str) -> tuple[Manifest, ...]:
    """What a cluster would be given."""
    command = [str(KUBECTL), "kustomize", str(PLACE / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(documents(done.stdout))


def named(manifest: Manifest) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def pod_of(manifest: Manifest) -> Manifest:
    pod: Manifest = manifest["spec"]["template"]["spec"]
    return pod


WRITTEN = manifests()
PODS = [each for each in WRITTEN if each["kind"] in ("Deployment", "Job")]
DEPLOYMENTS = [each for each in WRITTEN if each["kind"] == "Deployment"]


def test_a_manifest_fits_the_schema_of_kubernetes(subtests: pytest.Subtests) -> None:
    for manifest in [each for each in WRITTEN if each["kind"] != "ScaledObject"]:
        for version in VERSIONS:
            with subtests.test(manifest=named(manifest), version=version):
                kubernetes_validate.validate(manifest, version, strict=True)


@needs_kubectl
def test_rendered_manifests_fit_the_schemas_of_the_cluster(subtests: pytest.Subtests) -> None:
    for overlay in ["base", "overlays/production"]:
        with subtests.test(overlay=overlay):
            for manifest in built(overlay):
                if manifest["kind"] != "ScaledObject":
                    kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


def test_a_pod_keeps_to_the_restricted_standard(subtests: pytest.Subtests) -> None:
    for manifest in PODS:
        with subtests.test(manifest=named(manifest)):
            pod = pod_of(manifest)
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in pod["containers"]:
                rights = container["securityContext"]
                assert rights["allowPrivilegeEscalation"] is False
                assert rights["readOnlyRootFilesystem"] is True
                assert rights["capabilities"] == {"drop": ["ALL"]}
                assert {"requests", "limits"} <= set(container["resources"])
                mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
                assert mounted == {"/run/pipeline", "/tmp"}


def test_a_probe_checks_the_liveness_file_or_an_http_page(subtests: pytest.Subtests) -> None:
    command = ["sh", "-c", PROBE.format(file="/run/pipeline/alive", seconds=60)]
    for manifest in DEPLOYMENTS:
        with subtests.test(manifest=named(manifest)):
            (container,) = pod_of(manifest)["containers"]
            for name in ("livenessProbe", "readinessProbe"):
                probe = container[name]
                if "exec" in probe:
                    assert probe["exec"]["command"] == command
                else:
                    assert probe["httpGet"]["path"] in {"/healthcheck", "/healthz", "/readyz"}


def test_a_rollout_starts_a_new_one_before_it_ends_an_old_one(subtests: pytest.Subtests) -> None:
    for manifest in DEPLOYMENTS:
        with subtests.test(manifest=named(manifest)):
            assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_settings_are_ones_and_a_worker_has_time_to_finish_the_longest_phase() -> None:
    generated = document(PLACE / "base" / "kustomization.yaml")["configMapGenerator"][0]
    settings = Settings.load(dict(literal.split("=", 1) for literal in generated["literals"]))
    longest = max(settings.prepare_time_limit, settings.mutate_time_limit, settings.next_time_limit)
    (worker,) = [each for each in DEPLOYMENTS if each["metadata"]["name"] == "pipeline-worker"]
    grace = pod_of(worker)["terminationGracePeriodSeconds"]
    assert grace >= (longest + TIME_LIMIT_GRACE).total_seconds()


def test_commands_name_only_variables_that_their_pods_have() -> None:
    ingest = document(PLACE / "components/ingest/kustomization.yaml")["configMapGenerator"][0]
    given = {literal.partition("=")[0] for literal in ingest["literals"]}
    used = {
        name
        for manifest in PODS
        for argument in pod_of(manifest)["containers"][0]["args"]
        for name in re.findall(r"\$\((\w+)\)", argument)
    }
    assert used == given


def test_every_pod_with_metrics_is_scraped_and_its_network_policy_allows_it() -> None:
    (policy,) = [each for each in WRITTEN if each["metadata"]["name"] == "pipeline-scrape"]
    (allowed,) = policy["spec"]["podSelector"]["matchExpressions"]
    ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    serving = 0
    for manifest in DEPLOYMENTS:
        given = {each["name"]: each.get("value") for each in pod_of(manifest)["containers"][0].get("env", ())}
        if port := given.get("PIPELINE_METRICS_PORT"):
            template = manifest["spec"]["template"]["metadata"]
            assert template["annotations"]["prometheus.io/port"] == port
            assert template["labels"]["app.kubernetes.io/component"] in allowed["values"]
            assert int(port) in ports
            assert given["PIPELINE_METRICS_HOST"] == "0.0.0.0", "the default is loopback"
            serving += 1
    assert serving == 3


def test_every_selector_finds_something() -> None:
    components = {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in PODS}
    for manifest in WRITTEN:
        text = yaml.safe_dump(manifest.get("spec", {}))
        assert set(re.findall(r"app\.kubernetes\.io/component: ([\w-]+)", text)) <= components, named(manifest)


def test_workers_are_scaled_by_waiting_events() -> None:
    (scaled,) = [each for each in WRITTEN if each["kind"] == "ScaledObject"]
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] in {each["metadata"]["name"] for each in DEPLOYMENTS}
    assert 0 < spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
    for trigger in spec["triggers"]:
        given = trigger["metadata"]
        assert float(given["threshold"]) > 0
        assert {name for name, _ in promql.selectors(given["query"])} <= set(metrics())
        assert all(isinstance(value, str) for value in given.values()), "KEDA takes text"


@needs_kubectl
def test_production_leaves_the_number_of_workers_to_the_autoscaler_and_has_an_image_of_its_own() -> None:
    made = {named(each): each for each in built("overlays/production")}
    assert "replicas" not in made["Deployment-pipeline-worker"]["spec"]
    for manifest in made.values():
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "pipeline"
        if manifest["kind"] in ("Deployment", "Job"):
            assert re.fullmatch(r"[\w./-]+:[\w.-]+", pod_of(manifest)["containers"][0]["image"])
    for policy in ("closed", "servers", "world", "scrape", "console"):
        selector = made[f"NetworkPolicy-pipeline-{policy}"]["spec"]["podSelector"]
        assert selector["matchLabels"]["app.kubernetes.io/name"] == "pipeline"


@needs_kubectl
def test_production_makes_room_for_the_worker_and_keeps_workers_of_one_zone_apart() -> None:
    made = {named(each): each for each in built("overlays/production")}
    pod = pod_of(made["Deployment-pipeline-worker"])
    assert [each["topologyKey"] for each in pod["topologySpreadConstraints"]] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    assert made["Job-pipeline-migrate"]["spec"].get("selector") is None


@needs_kubectl
def test_everything_that_the_migration_needs_is_applied_first() -> None:
    first = {
        named(each) for each in built("overlays/production") if "pipeline/first" in each["metadata"].get("labels", {})
    }
    made = {named(each): each for each in built("overlays/production")}
    pod = pod_of(made["Job-pipeline-migrate"])
    (settings,) = [each["configMapRef"]["name"] for each in pod["containers"][0]["envFrom"] if "configMapRef" in each]
    needed = {"Namespace-pipeline", "Job-pipeline-migrate", f"ServiceAccount-{pod['serviceAccountName']}"}
    assert first == {*needed, f"ConfigMap-{settings}"}
