"""Lints, renders and validates the Helm chart: `make test-chart`.

Helm's own program is built from its Go module into .tools/bin, unless there is one. What it renders from each file of ci/ is validated
against the schemas of several Kubernetes versions, the models of KEDA's and the Prometheus operator's resources, and the server's own code.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/sluiceway"
HELM = "helm.sh/helm/v3/cmd/helm@v3.22.0"
PACKAGES = ("kubernetes-validate==1.37.0", "cloudcoil.models.keda==2.16.1.0", "cloudcoil.models.prometheus-operator==0.80.1.0")
VERSIONS = ("1.31", "1.34", "1.37")
"""Of Kubernetes."""
OF_OTHERS = {
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    "TriggerAuthentication": "cloudcoil.models.keda.v1alpha1",
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
}
SECRETS = {"admin-key": "5ecre7" * 8, "meta-url": "postgresql://u@h/meta", "partitions-url": "postgresql://u@h/items"}
WORKER = "workers.w.image=w:1,workers.w.handler=t:f,workers.w.queue=q,workers.w.autoscaling.enabled=true"
REFUSED = {
    "cluster.enabled=true": "cluster.postgres.existingSecret",
    "cluster.enabled=true,cluster.postgres.existingSecret=x,processes=2": "processes is for one server",
    "workers.w.image=w:1,workers.w.queue=q": "workers.w.handler is not set",
    WORKER: "workers.w.autoscaling.apiKey.existingSecret",
    "replicas=2": "additional properties 'replicas' not allowed",
    "workers.w.replica=2": "additional properties 'replica' not allowed",
}
"""Values that must not render, and what the message names."""

Document = dict[str, Any]


def helm(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm", path=f"{ROOT / '.tools/bin'}:{os.environ['PATH']}")
    assert program is not None
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


def has_helm() -> bool:
    return shutil.which("helm", path=f"{ROOT / '.tools/bin'}:{os.environ['PATH']}") is not None


def install() -> bool:
    """Bring Helm and the schemas. False: Helm is not to be had."""
    if not has_helm():
        if shutil.which("go") is None:
            return False
        print("building Helm, which takes some minutes", flush=True)
        subprocess.run(["go", "install", HELM], env={**os.environ, "GOBIN": str(ROOT / ".tools/bin")}, check=True)
    place = ROOT / ".tools/chart"
    stamp = place / ".packages"
    if not stamp.exists() or stamp.read_text() != repr(PACKAGES):
        subprocess.run([ROOT / ".tools/bin/python", "-m", "venv", "--clear", place], check=True)
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([place / "bin/python", *pip, *PACKAGES], check=True)
        stamp.write_text(repr(PACKAGES))
    return True


def rendered(values: Path, version: str) -> list[Document]:
    import yaml

    done = helm("template", "q", CHART, "--namespace", "prod", "--kube-version", f"{version}.0", "--values", values)
    assert done.returncode == 0, f"{values.name}: {done.stderr}"
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def validate() -> None:
    """Validate the documents of standard input, (version, document) pairs, against schemas. Runs with the schemas' own packages."""
    kubernetes_validate = importlib.import_module("kubernetes_validate")
    for version, document in json.load(sys.stdin):
        if document["kind"] in OF_OTHERS:
            model = getattr(importlib.import_module(OF_OTHERS[document["kind"]]), document["kind"])
            # The models drop what they do not know.
            again = json.loads(model.model_validate(document).model_dump_json(by_alias=True, exclude_unset=True))
            assert again == document, f"{document['kind']}: unknown or changed fields\n{document}\n{again}"
        else:
            kubernetes_validate.validate(document, version, strict=True)


def named(documents: list[Document], kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Yield the name and the pod template of each workload."""
    for each in documents:
        if each["kind"] in ("StatefulSet", "Deployment"):
            template = each["spec"]["template"]
            assert each["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            yield each["metadata"]["name"], template


def check_references(documents: list[Document]) -> None:
    """Selectors select, and names name something."""
    labels = [template["metadata"]["labels"] for _, template in pods(documents)]
    services = named(documents, "Service")
    selectors = [each["spec"]["selector"] for each in services.values()]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in named(documents, "PodDisruptionBudget").values()]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in named(documents, "NetworkPolicy").values()]
    for selector in selectors:
        assert sum(selector.items() <= each.items() for each in labels) == 1, selector
    for each in named(documents, "StatefulSet").values():
        assert services[each["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"
    for monitor in named(documents, "ServiceMonitor").values():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        assert [name for name, each in services.items() if wanted <= each["metadata"]["labels"].items()] == ["q-sluiceway-peers"]
    deployments = named(documents, "Deployment")
    for scaled in named(documents, "ScaledObject").values():
        assert "replicas" not in deployments[scaled["spec"]["scaleTargetRef"]["name"]]["spec"], "KEDA decides"


def check_security(documents: list[Document]) -> None:
    """Each pod meets the Pod Security Standard `restricted`, and has no more than it needs."""
    for name, template in pods(documents):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claimed = {"data"} if name == "q-sluiceway" else set()
            assert mounted == {volume["name"] for volume in spec["volumes"]} | claimed, name


def check_server(documents: list[Document], place: Path) -> None:
    """The server takes its environment and its configuration file."""
    from sluiceway.instance.configuration import load

    (container,) = named(documents, "StatefulSet")["q-sluiceway"]["spec"]["template"]["spec"]["containers"]
    for name, value in SECRETS.items():
        (place / name).write_text(value)
    (place / "sluiceway.toml").write_text(named(documents, "ConfigMap")["q-sluiceway"]["data"]["sluiceway.toml"])
    environment = {each["name"]: each.get("value", "postgresql://u@h/other") for each in container["env"]}
    environment = {name: value.replace("/run/secrets/sluiceway", str(place)) for name, value in environment.items()}
    configuration = load(place / "sluiceway.toml", environment).configuration
    tls = bool(configuration.server.tls_certificate)
    assert configuration.server.listen == f"0.0.0.0:{container['ports'][0]['containerPort']}"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == ("HTTPS" if tls else "HTTP")
    if configuration.is_clustered and configuration.server.workers == 1:
        assert configuration.cluster.advertise == f"http{'s' * tls}://$(POD_NAME).q-sluiceway-peers.prod.svc:2319"
        assert [type(each).__name__ for each in configuration.backends.values()] == ["PostgresBackend"]


def main() -> None:
    if not install():
        print("SKIPPED: test-chart needs Helm, or Go to build it", file=sys.stderr)
        return
    files, pairs = sorted((CHART / "ci").glob("*.yaml")), []
    for values in files:
        done = helm("lint", CHART, "--strict", "--kube-version", f"{VERSIONS[0]}.0", "--values", values)
        assert done.returncode == 0, done.stdout + done.stderr
        for version in VERSIONS:
            documents = rendered(values, version)
            pairs += [(version, document) for document in documents]
        check_references(documents)
        check_security(documents)
        with tempfile.TemporaryDirectory() as place:
            check_server(documents, Path(place))
        print(f"{values.name}: {', '.join(sorted({document['kind'] for document in documents}))}", flush=True)
    done = subprocess.run([ROOT / ".tools/chart/bin/python", __file__, "validate"], input=json.dumps(pairs), text=True, check=False)
    assert done.returncode == 0, "not valid"
    print(f"{len(pairs)} documents are valid for Kubernetes {', '.join(VERSIONS)}")
    for values_set, message in REFUSED.items():
        done = helm("template", "q", CHART, "--kube-version", f"{VERSIONS[0]}.0", "--set", values_set)
        assert done.returncode != 0, f"{values_set} renders"
        assert message in done.stderr, f"{values_set}: {done.stderr}"
    print(f"{len(files) + len(REFUSED)} passed, 0 failed")


if __name__ == "__main__":
    validate() if sys.argv[1:] == ["validate"] else main()
