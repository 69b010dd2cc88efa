"""The site of `make docs`, as far as it is put together without Zensical: every page has a place, and every link leads somewhere."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.repository.test_docs_links import broken


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the site's pages."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repository / "tools")
        runpy.run_path(str(repository / "tools" / "docs_site.py"))["Site"](folder).assemble()
    return folder / "docs"


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.md"))
    assert len(pages) > 180
    assert not {str(page.relative_to(site)): found for page in pages if (found := list(broken(page)))}


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("reference/commands/queue.md", "## sluiceway queue create"),
        ("reference/settings.md", "| `disk_reserve` | integer | `67108864` | restart |"),
        ("reference/http/queue.md", "## `POST /v1/queue.lease`"),
        ("reference/metrics.md", "| `sluiceway_queue_items` | gauge | `queue`, `state` |"),
        ("reference/metrics.md", "| `sluiceway_worker_items_total` | counter | `queue`, `outcome` |"),
        ("reference/python/client.md", "::: sluiceway.client.AsyncClient"),
        ("guides/index.md", "* [Workers](workers.md): Run your handler"),
        ("files/deploy/kubernetes/worker.yaml", "kind: Deployment"),
    ],
)
def test_the_reference_comes_from_the_code(site: Path, page: str, words: str) -> None:
    assert words in (site / page).read_text(encoding="utf-8")
