"""Metadata of both distributions: the project's URLs, and a README whose links also work on a package index."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\((?![a-z]+:|#)([^)\s]+)\)")
"""A link or an image of Markdown to a file of the repository. Its text may hold an image."""


class IndexPage(MetadataHookInterface):
    """Sets `readme` and `urls`. `folder` is where the README is in the repository, "" for its root."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        source = root / "src" if (root / "src").is_dir() else root.parent / "src"
        package = (source / "sluiceway" / "__init__.py").read_text(encoding="utf-8")
        version, repository = (_constant(package, name) for name in ("__version__", "REPOSITORY"))
        tree = "main" if "dev" in version else f"v{version}"
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, self.config.get("folder", ""), repository, tree)}
        metadata["urls"] = {
            "Homepage": repository,
            "Documentation": f"{repository}/tree/{tree}/docs",
            "Changelog": f"{repository}/blob/{tree}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
            "Source": repository,
        }


def absolute(text: str, folder: str, repository: str, tree: str) -> str:
    """The Markdown with links into the repository at a branch or tag, in place of relative ones."""

    def replace(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        path = normpath(f"{folder}/{target}".lstrip("/"))
        return f"{image}[{absolute(label, folder, repository, tree)}]({repository}/{'raw' if image else 'blob'}/{tree}/{path})"

    # Code is not prose: `a[i](x)` in an example stays as it is.
    parts = re.split(r"(^```.*?^```|`[^`\n]*`)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else _LINK.sub(replace, part) for index, part in enumerate(parts))


def _constant(module: str, name: str) -> str:
    found = re.search(rf'^{name} = "([^"]+)"$', module, re.MULTILINE)
    assert found is not None, name
    return found[1]
