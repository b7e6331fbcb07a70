"""What stands in etcd for a component, written by a test in the place of workers."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message
from kvrouter.net.etcd import connect
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.names import ComponentName


@dataclass(kw_only=True)
class Registered:
    """A component in etcd."""

    component: ComponentName
    etcd: str

    @property
    def named(self) -> Component:
        return Component(namespace=self.component.namespace, name=self.component.name)

    async def put(self, key: str, message: Message) -> None:
        async with connect(self.etcd) as client:
            await client.put(key.encode(), message.SerializeToString())

    async def delete(self, key: str) -> None:
        async with connect(self.etcd) as client:
            await client.delete(key.encode())
