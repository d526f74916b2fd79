"""Publishes the changes of a group's prefix caches to routers outside the deployment."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dist_aclgraph.actors.wire.event_publisher import EventPublishers, PublisherPlace
from dist_aclgraph.config import KVEventsConfig
from dist_aclgraph.kv.events import CacheEvents


class KVEvents:
    """Owns one publisher for each cache of a group. Only the engine loop's thread may use this
    object.

    The first message of each publisher contains the event AllBlocksCleared. Subscribers may still
    have a list of blocks from an earlier group that published at the same port, and must empty this
    list.

    Args:
        caches: for each data-parallel rank, the object that records the changes of the rank's block
            pool. The pools must be empty.

    Raises:
        PlacementError: there are too few free ports.
    """

    def __init__(self, caches: Sequence[CacheEvents], place: PublisherPlace) -> None:
        self._caches = tuple(caches)
        self._publishers = EventPublishers(place, len(self._caches))
        self.publish()

    def publish(self) -> None:
        """For each cache that has changed since the last call, send one message with all its
        changes.
        """
        for index, cache in enumerate(self._caches):
            publisher = self._publishers[index]
            if payload := cache.take(time.time(), publisher.index):
                publisher.publish(payload)

    def close(self) -> None:
        """Tell subscribers that the caches are empty, and release the ports."""
        for cache in self._caches:
            cache.cleared()
        self.publish()
        self._publishers.close()


def publisher_place(config: KVEventsConfig) -> PublisherPlace:
    """Return the address, ports and topic that the publishers of this configuration use."""
    return PublisherPlace(
        config.host,
        config.port_range,
        config.replay_range,
        config.topic.encode(),
        config.buffer_steps,
    )
