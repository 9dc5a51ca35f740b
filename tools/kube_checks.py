"""Checks of Kubernetes manifests, run by the Python of .venv-kube (tools/kube_tools.sh).

    python tools/kube_checks.py validate 1.29 1.37 < manifests.json    prints problems, a line for each
    python tools/kube_checks.py inject < policy-and-pod.json           prints the pod as the policy leaves it

``inject`` stands for the API server: it evaluates the CEL of a MutatingAdmissionPolicy and merges the outcome
into the pod by the keys of its lists. As there, the type of each object has to be that of its place.
"""

import json
import re
import sys
from typing import Any

import celpy
import kubernetes_validate

_CUSTOM = ("cert-manager.io/", "monitoring.coreos.com/", "security.openshift.io/")
"""Groups of resources whose schemas are not Kubernetes' own."""
_KEYS = ("name", "mountPath", "containerPort")
"""The names of elements in lists of a pod; the first that all elements have."""


def validate(manifests: list[dict[str, Any]], versions: list[str]) -> list[str]:
    """Return what the schemas of these versions refuse, with unknown fields."""
    problems = []
    for manifest in manifests:
        if manifest["apiVersion"].startswith(_CUSTOM):
            continue
        for version in versions:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
                name = f"{manifest['kind']} {manifest['metadata']['name']}"
                problems.append(f"{version}: {name}: {str(error).splitlines()[0]}")
    return problems


def evaluate(expression: str, pod: dict[str, Any]) -> Any:
    """Return the value of a CEL expression on a pod."""
    # Object.spec{name: …} of the API server is {"": "Object.spec", "name": …} here.
    text = re.sub(r"\b(Object(?:\.\w+)*)\{(?=(\}?))", _as_map, expression)
    text = re.sub(r'(?<!["\w])(\w+): ', r'"\1": ', text)
    environment = celpy.Environment()
    program = environment.program(environment.compile(text))
    value = program.evaluate({"object": celpy.json_to_cel(pod)})
    return json.loads(json.dumps(value, cls=celpy.CELJSONEncoder))


def _as_map(found: re.Match[str]) -> str:
    return f'{{"": "{found[1]}"{"" if found[2] else ", "}'


def without_types(value: Any, place: str = "Object") -> Any:
    """Return the outcome of a mutation as plain data.

    Raises:
        ValueError: An object's type is not that of its place.
    """
    if isinstance(value, list):
        return [without_types(each, place) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("", place) != place:
        raise ValueError(f"{value['']} stands at {place}")
    return {key: without_types(each, f"{place}.{key}") for key, each in value.items() if key}


def merge(old: Any, new: Any) -> Any:
    """Return the outcome of applying a part of a configuration."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: merge(old.get(key), value) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list):
        for key in _KEYS:
            if all(isinstance(each, dict) and key in each for each in (*old, *new)):
                by_key = {each[key]: each for each in old}
                for each in new:
                    by_key[each[key]] = merge(by_key.get(each[key]), each)
                return list(by_key.values())
    return new


def inject(policy: dict[str, Any], pod: dict[str, Any]) -> dict[str, Any]:
    """Return a pod as the policy leaves it; unchanged where one of the policy's conditions does not hold."""
    spec = policy["spec"]
    if not all(evaluate(condition["expression"], pod) for condition in spec["matchConditions"]):
        return pod
    for mutation in spec["mutations"]:
        outcome = evaluate(mutation["applyConfiguration"]["expression"], pod)
        pod = merge(pod, without_types(outcome))
    return pod


def main() -> int:
    """Read JSON from standard input, and do what the first argument names."""
    what, *versions = sys.argv[1:]
    given = json.load(sys.stdin)
    if what == "inject":
        print(json.dumps(inject(given["policy"], given["pod"])))
        return 0
    problems = validate(given, versions)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
