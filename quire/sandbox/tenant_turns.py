"""Turns of tenants: which waiting job gets the next free worker.

Service is the time for which jobs of a tenant occupy workers, divided by the tenant's weight. The
waiting tenant with the least service is next; within a tenant the job that came first. Service is
measured while jobs run, so it does not depend on a size that a file states. A tenant that returns
starts level with those that have jobs: no credit for the past. With one tenant this is first come,
first served.

Jobs cannot be interrupted and may take minutes. So there is one worker more, for the tenant whose
turn it is while jobs of others occupy all workers.

Source: Goyal et al., Start-time Fair Queueing, SIGCOMM 1996 (least service first; the level of a
tenant that returns); the measured service and the worker more are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

J = TypeVar("J")


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant, and its weight: with twice the weight it gets twice the service."""

    tenant: bytes = b""
    weight: float = 1.0


NO_TENANT = TenantShare()
"""Of servers without a key file, and of callers in this process."""


class _TenantJobs(Generic[J]):
    """Jobs of one tenant. service: of those that ended. running: with the times of their starts."""

    __slots__ = ("running", "service", "waiting", "weight")

    def __init__(self) -> None:
        self.waiting: dict[J, None] = {}
        self.running: dict[J, float] = {}
        self.service = 0.0
        self.weight = 1.0

    def service_until(self, now: float) -> float:
        return self.service + sum(now - began for began in self.running.values()) / self.weight


class TenantTurns(Generic[J]):
    """Waiting and running jobs, which are hashable. Times are seconds of one clock."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._tenants: dict[bytes, _TenantJobs[J]] = {}
        self._tenant_of: dict[J, _TenantJobs[J]] = {}

    def num_waiting(self, tenant: bytes) -> int:
        """Return the number of waiting jobs of a tenant."""
        return len(self._tenants[tenant].waiting) if tenant in self._tenants else 0

    def push(self, job: J, share: TenantShare, now: float) -> None:
        """Let a job wait for its turn."""
        tenant = self._tenants.setdefault(share.tenant, _TenantJobs())
        if not tenant.waiting and not tenant.running:
            levels = [
                one.service_until(now)
                for one in self._tenants.values()
                if one.waiting or one.running
            ]
            tenant.service = max(tenant.service, min(levels, default=0.0))
        tenant.weight = share.weight
        tenant.waiting[job] = None
        self._tenant_of[job] = tenant

    def start(self, now: float) -> J | None:
        """Return the job that runs next, from now on. None: none waits, or no worker is free."""
        waiting = [one for one in self._tenants.values() if one.waiting]
        occupied = sum(len(one.running) for one in self._tenants.values())
        if not waiting or occupied > self._workers:
            return None
        tenant = min(waiting, key=lambda one: (one.service_until(now), len(one.running)))
        if occupied == self._workers and tenant.running:
            return None
        job = next(iter(tenant.waiting))
        del tenant.waiting[job]
        tenant.running[job] = now
        return job

    def finish(self, job: J, now: float) -> None:
        """A running job has ended."""
        tenant = self._tenant_of.pop(job)
        tenant.service += (now - tenant.running.pop(job)) / tenant.weight
        self._forget_if_idle()

    def remove(self, job: J) -> bool:
        """Take a job out of the queue. Returns False if it runs or has ended."""
        tenant = self._tenant_of.get(job)
        if tenant is None or job not in tenant.waiting:
            return False
        del tenant.waiting[job], self._tenant_of[job]
        self._forget_if_idle()
        return True

    def remove_all(self) -> list[J]:
        """Take all jobs out of the queue, and return them."""
        return [job for job in list(self._tenant_of) if self.remove(job)]

    def _forget_if_idle(self) -> None:
        """Forget services once no tenant has a job; so the table stays small, too."""
        if not self._tenant_of:
            self._tenants.clear()
