"""Work that all ranks do together before serving, and that ends on all ranks if it fails on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dbo_runtime.errors import DboError, RankError
from dbo_runtime.vllm_plugin.parallel.agreement import gather

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class JointWork:
    """Ranks that meet repeatedly while they work, and learn at the next meeting if one of them cannot go on.

    Otherwise the other ranks would wait for a failed rank until a time limit ends them. This still happens if a rank
    fails between two meetings while ranks communicate in other ways, so ranks should meet before they do.

    Args:
        group: vLLM's coordinator of the ranks.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        self._group = group

    def gather(self, own: Any = None) -> list[Any]:
        """Return the value of each rank, which must be JSON data; see `agreement.gather`.

        Raises:
            RankError: raised on all ranks if one of them has failed.
        """
        return self._meet(own, "")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Tell the other ranks if the work inside this context fails here.

        Raises:
            DboError: the error raised here, if it is a DboError; or a RankError for any other error, or if another rank
                failed.
        """
        try:
            yield
        except RankError:
            raise  # all ranks know already
        except Exception as error:
            try:
                self._meet(None, str(error) if isinstance(error, DboError) else repr(error))
            except RankError as failure:
                if not isinstance(error, DboError):
                    raise failure from error
            raise

    def _meet(self, own: Any, problem: str) -> list[Any]:
        gathered = gather(self._group, [own, problem])
        for rank, (_, failed) in enumerate(gathered):
            if failed:
                raise RankError(failed if len(gathered) == 1 else f"rank {rank}: {failed}")
        return [value for value, _ in gathered]
