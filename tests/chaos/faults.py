"""What is done to the mesh while it works: each fault by its name, and random sequences of them from a seed."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.environment.page import OPEN, episode_key
from services.environment.record import decoded
from shared.errors import StoreUnavailableError
from tests.chaos.clients import Client
from tests.chaos.fleet import LEASE_S, TERMINATED, Fleet, Replica
from tests.mesh.processes import SERVICES

FREEZE_LEASES = (1.5, 2.5)
REDIS_PAUSE_S = 3.0
TAKEOVER_BOUND_S = 60.0
LOOK_S = 0.02


@dataclass
class Faults:
    """`done` counts faults by name; `takeovers` has, by fault, the seconds until each episode was someone else's."""

    fleet: Fleet
    client: Client
    dice: random.Random
    done: Counter[str] = field(default_factory=Counter)
    takeovers: list[tuple[str, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _watching: set["asyncio.Task[None]"] = field(default_factory=set)
    _redis: asyncio.Lock = field(default_factory=asyncio.Lock)
    _balancer: asyncio.Lock = field(default_factory=asyncio.Lock)

    def all(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Every fault by its name."""
        of_services = {"kill": self.kill, "stop": self.stop, "freeze": self.freeze}
        return {
            **{f"{what} {service}": _bound(do, service) for what, do in of_services.items() for service in SERVICES},
            "reload the balancer": self.reload_balancer,
            "restart the balancer": self.restart_balancer,
            "pause redis": self.pause_redis,
            "restart redis": self.restart_redis,
            "cut clients": self.cut_clients,
        }

    async def do(self, name: str) -> None:
        self.fleet.journal.note("begins", fault=name)
        await self.all()[name]()
        self.fleet.journal.note("is over", fault=name)
        self.done[name] += 1

    async def kill(self, service: str) -> None:
        """KILL, and start it again at once."""
        async with self._one_of(service) as replica:
            async with self._watched(replica, "kill"):
                await replica.kill()
            await replica.start()
            await replica.ready()

    async def stop(self, service: str) -> None:
        """TERM, as in a rolling restart."""
        async with self._one_of(service) as replica:
            async with self._watched(replica, "stop"):
                try:
                    status = await replica.terminate()
                except TimeoutError:
                    self.wrong.append(f"{replica.name} did not end within its bound after TERM")
                    await replica.kill()
                else:
                    if status != TERMINATED:
                        self.wrong.append(f"{replica.name} ended with {status} after TERM")
            await replica.start()
            await replica.ready()

    async def freeze(self, service: str) -> None:
        """Stand still for longer than any claim lives, then wake up."""
        async with self._one_of(service) as replica:
            async with self._watched(replica, "freeze"):
                replica.send(signal.SIGSTOP)
            try:
                await asyncio.sleep(LEASE_S * self.dice.uniform(*FREEZE_LEASES))
            finally:
                replica.send(signal.SIGCONT)
            await replica.ready()

    async def reload_balancer(self) -> None:
        """Take one replica of each service out and in again, by two reloads."""
        async with self._balancer:
            fleet, left_out = self.fleet, self.dice.randrange(3)
            fewer = {name: [*urls[:left_out], *urls[left_out + 1 :]] for name, urls in fleet.servers.items()}
            await asyncio.to_thread(fleet.balancer.reload, fewer)
            await asyncio.to_thread(fleet.balancer.reload, fleet.servers)

    async def restart_balancer(self) -> None:
        async with self._balancer:
            await self.fleet.restart_balancer()

    async def pause_redis(self) -> None:
        async with self._redis:
            self.fleet.redis.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(REDIS_PAUSE_S)
            finally:
                self.fleet.redis.signal(signal.SIGCONT)

    async def restart_redis(self) -> None:
        async with self._redis:
            await asyncio.to_thread(self.fleet.restart_redis)

    async def cut_clients(self) -> None:
        self.client.cut(0.5)

    async def settled(self) -> None:
        """Until every takeover that is waited for has come."""
        if self._watching:
            await asyncio.wait(self._watching)

    @asynccontextmanager
    async def _one_of(self, service: str) -> AsyncIterator[Replica]:
        """A replica to which nothing is done yet."""
        replicas = self.fleet.replicas[service]
        replica = self.dice.choice([replica for replica in replicas if not replica.busy.locked()] or replicas)
        async with replica.busy:
            self.fleet.journal.note("it is done to", fault=replica.name)
            yield replica

    @asynccontextmanager
    async def _watched(self, replica: Replica, fault: str) -> AsyncIterator[None]:
        """Measure how long the environment's replica keeps what it had when the block was entered."""
        keys = await self._owned_by(replica) if replica.service == "environment" else {}
        began = time.monotonic()
        for key, owner in keys.items():
            watching = asyncio.create_task(self._watch(key, owner, fault, began))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
        yield

    async def _owned_by(self, replica: Replica) -> dict[str, str]:
        """The open episodes of this replica, and under which name it has each."""
        owned: dict[str, str] = {}
        instance = await replica.instance()
        try:
            for key in await self.fleet.store.members(OPEN):
                found = await self.fleet.store.get(episode_key(key))
                record = None if found is None else decoded(found.value)
                if record is not None and not record.ended and record.owner.partition(".")[0] == instance:
                    owned[key] = record.owner
        except StoreUnavailableError:
            return {}
        return owned

    async def _watch(self, key: str, owner: str, fault: str, began: float) -> None:
        while time.monotonic() - began < TAKEOVER_BOUND_S:
            try:
                found = await self.fleet.store.get(episode_key(key))
            except StoreUnavailableError:
                found = None
            if found is not None and (record := decoded(found.value)).owner != owner:
                self.takeovers.append((fault, time.monotonic() - began))
                return
            if found is not None and record.ended:
                return  # it had ended by itself
            await asyncio.sleep(LOOK_S)
        self.wrong.append(f"{key} was not taken over within {TAKEOVER_BOUND_S:g} s after '{fault}'")


def _bound(do: Callable[[str], Awaitable[None]], service: str) -> Callable[[], Awaitable[None]]:
    async def bound() -> None:
        await do(service)

    return bound


async def storm(faults: Faults, *, pause_s: tuple[float, float]) -> None:
    """Random faults, which overlap but each only with others, until cancelled; those under way are ended well."""
    names = sorted(faults.all())
    under_way: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            await asyncio.sleep(faults.dice.uniform(*pause_s))
            name = faults.dice.choice(names)
            if name not in under_way or under_way[name].done():
                under_way[name] = asyncio.create_task(faults.do(name))
    finally:
        await asyncio.gather(*under_way.values())
