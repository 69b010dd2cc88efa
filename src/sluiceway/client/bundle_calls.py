"""Encoders of the calls on bundles."""

from __future__ import annotations

from sluiceway.client.item_calls import wire_item
from sluiceway.client.protocol import Call, call, given
from sluiceway.contract.bundle_answers import BundleInfo, BundlePage
from sluiceway.kernel.errors import invalid


def create_bundle(queue_name: str, follow_up: object, follow_up_queue: str | None, items: int | None) -> Call[BundleInfo]:
    if follow_up is None and follow_up_queue is not None:
        raise invalid("follow_up", "required with follow_up_queue")
    fields = given(queue_name=queue_name, items=items)
    if follow_up is not None:
        fields["follow_up"] = {"queue_name": follow_up_queue or queue_name, "item": wire_item(follow_up)}
    # A repeat creates another one.
    return call("/v1/bundles.create", BundleInfo, fields, repeatable=False)


def get_bundle(id: str) -> Call[BundleInfo]:
    return call("/v1/bundles.get", BundleInfo, {"id": id})


def list_bundles(queue_name: str | None, pivot: str | None, limit: int | None) -> Call[BundlePage]:
    return call("/v1/bundles.list", BundlePage, given(queue_name=queue_name, pivot=pivot, limit=limit))


def close_bundle(id: str) -> Call[BundleInfo]:
    return call("/v1/bundles.close", BundleInfo, {"id": id})


def cancel_bundle(id: str) -> Call[BundleInfo]:
    return call("/v1/bundles.cancel", BundleInfo, {"id": id})
