"""Write the failure domain of the Kubernetes node that this pod is on into a file; nothing, if it has no such label.

Runs in an init container. The labels are those of the node, from the outermost to the innermost, and their values
joined are the domain, such as ``zone-b.rack-17``. Needs only Python, and leave to get nodes.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def main() -> None:
    """Settings come from the environment, as a pod's manifest gives them."""
    server = f"{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    account = Path(os.environ.get("ACCOUNT_DIR", ACCOUNT))
    wanted = os.environ["DOMAIN_LABELS"].split(",")
    request = urllib.request.Request(
        f"https://{server}/api/v1/nodes/{os.environ['NODE_NAME']}",
        headers={"Authorization": f"Bearer {(account / 'token').read_text().strip()}"},
    )
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    with urllib.request.urlopen(request, timeout=30, context=trusted) as response:
        labels = json.load(response)["metadata"].get("labels", {})
    domain = ".".join(labels[name] for name in wanted if labels.get(name))
    Path(os.environ["DOMAIN_FILE"]).write_text(domain)
    print(f"failure domain of {os.environ['NODE_NAME']}: {domain or 'none of its labels'}")


if __name__ == "__main__":
    main()
