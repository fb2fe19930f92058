"""Plan the batches of one model and run them in overlapped micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from dbo_runtime.batch import MIN_SHARE, Batch, BatchSlice, Thresholds, slice_batch, split_evenly
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.executor import Enter, Executor, Inputs, Outputs, no_context
from dbo_runtime.engine.executor_cache import ExecutorCache, make_sanitized
from dbo_runtime.engine.nano_schedules import NANO_BATCHES, NanoSchedules
from dbo_runtime.engine.statistics import Statistics
from dbo_runtime.engine.transport import check_transport
from dbo_runtime.errors import get_context
from dbo_runtime.ir.nano_batches import Rows, group_outputs
from dbo_runtime.ir.op import SIDE
from dbo_runtime.ir.policies import LATEST_FIRST, keep_layers
from dbo_runtime.ir.program import Program
from dbo_runtime.nano_sizes import share_nano_batches, slice_nano_batches
from dbo_runtime.observe.declines import count_declined, note_standing
from dbo_runtime.observe.instrument import Instrument
from dbo_runtime.observe.ranges import open_step
from dbo_runtime.planner.online.cuts import Cut
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.setting_values import MAX_MICRO_BATCHES, Check, name_policy

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

SharedSplit: TypeAlias = "SplitChoice | Cut"
"""A split that data parallel ranks share: a `SplitChoice` with costs, or only a `Cut` without."""

OFF = Decline("DBO_MODE is off")


class MicroBatchRuntime:
    """Plans batches and runs them in overlapped micro-batches.

    Args:
        program: ops of one micro-batch. All micro-batches have the same. Its `side` ops run on `side` only where the
            settings or costs ask for it.
        device: runs the ops.
        config: settings; may be replaced between steps, on all ranks alike.
        log: gets a line for each new plan and for the first decline of each reason, but none for each step.
        ranks: number of ranks that run the same plans, with collectives among them.
        keeps_layers: whether no micro-batch may attend in a layer before all have attended in the one before it. Orders
            of the policies `optimal` and `alternate` then keep to that.
        rows: functions that join and cut values; None if no step is cut into nano-batches.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        config: RuntimeConfig,
        log: FilteringBoundLogger,
        ranks: int = 1,
        keeps_layers: bool = False,
        rows: Rows | None = None,
    ) -> None:
        self.program = program
        self.rows = rows
        self.device = device
        self.config = config
        self.statistics = Statistics()
        self.keeps_layers = keeps_layers
        self.log = log
        self._planner: Planner | None = None
        self.events = EventTable(device)
        self._nano = NanoSchedules(program, rows)
        self._executors = ExecutorCache(device, log, ranks, self.events)
        self._sanitized = ExecutorCache(device, log, ranks, self.events, make_sanitized)

    @property
    def planner(self) -> Planner | None:
        """The planner, which decides by costs; None without costs."""
        return self._planner

    @planner.setter
    def planner(self, planner: Planner | None) -> None:
        self._planner = planner
        self._executors.forget_orders()
        self._sanitized.forget_orders()

    @property
    def forces_side(self) -> bool:
        """Whether the settings put ops on `side` in every step, also in steps that are not split."""
        return self.config.side == "on" and self.config.mode != "off" and SIDE in self.program.lanes

    @property
    def _cache(self) -> ExecutorCache:
        """The cache of the executors that the settings ask for."""
        return self._sanitized if self.config.check is Check.RACES else self._executors

    @property
    def _thresholds(self) -> Thresholds:
        """What `auto` requires of a step when there are no costs. The defaults are those of vllm-ascend #941."""
        if self.config.mode != "auto":
            return Thresholds()
        return Thresholds(self.config.min_tokens, self.config.min_prefill_tokens, MIN_SHARE)

    def describe_caches(self) -> dict[str, tuple[int, int]]:
        """Return the number of entries of each cache of plans, and the most that it keeps."""
        planned = {} if self._planner is None else self._planner.memory.sizes_and_capacities
        most = 2 * len(self.program.ops) * MAX_MICRO_BATCHES
        return {
            "executors": self._executors.size_and_capacity,
            "sanitized executors": self._sanitized.size_and_capacity,
            "events": (len(self.events), most),
            **planned,
        }

    def prepare(self, config: RuntimeConfig) -> None:
        """Obey *config* from the next step on, and do now what would take long inside a step.

        With a planner, all orders that it may choose are found and proven safe, and their executors made. This takes
        seconds. All ranks do it together, and all raise the same errors.

        Raises:
            ScheduleError: if an order is not safe.
        """
        if self._planner is not None and config.mode != "off":
            self._planner.prepare(config)
            for order in self._planner.orders:
                self._cache.get_by_name(order.name, len(order.programs), order.schedule)
        self.config = config

    def check_transport(self, transport: str) -> Decline | None:
        """Decline every step if there is no communication to hide; see `transport.check_transport`."""
        planner = self._planner
        return check_transport(
            transport, self.config.mode, planner is not None, planner is not None and planner.can_use_side
        )

    def decline_early(self, tokens: int) -> Decline | None:
        """Decline a step of *tokens* tokens before its requests are read, if no requests would get it split."""
        if self.config.mode == "off":
            return OFF
        if self._planner is None:
            return self._thresholds.check_tokens(tokens)
        return self._planner.decline_early(tokens) if self.config.mode == "auto" else None

    def decline_prefill(self, tokens: int) -> Decline | None:
        """Decline a step with few prefill *tokens*, before its requests are read. With costs, the planner decides."""
        return None if self._planner is not None else self._thresholds.check_prefill(tokens)

    def check_balance(self, share: float) -> Decline | None:
        """Decline a cut whose smallest micro-batch has too small a *share* of the work of an even one; `auto` only."""
        if share >= self._thresholds.share:
            return None
        return Decline("no balanced cut", f"the smallest micro-batch would have {share:.0%} of an even one's work")

    def plan(
        self, batch: Batch, cuts: Sequence[int] | None = None, shared: SharedSplit | None = None
    ) -> ExecutionPlan | Decline:
        """Decide how to run *batch*.

        With *cuts* (token offsets), split exactly there, whatever the settings say. If *shared* is given, other ranks
        rely on these cuts; see `slice_batch`.

        A decline is only returned. A caller that acts on it counts it with `decline`.

        Raises:
            SplitError: if *cuts* are given and impossible.
        """
        if cuts is not None:
            slices: tuple[BatchSlice, ...] | Decline = slice_batch(batch, cuts, agreed=shared is not None)
            return self._bind(slices, shared if isinstance(shared, SplitChoice) else None)
        if self.config.mode == "off":
            return OFF
        if self._planner is None:
            return self._bind(self._thresholds.choose(batch, self.config.parts))
        choice = self._planner.choose(batch, self.config)
        return choice if isinstance(choice, Decline) else self._bind(choice.slices, choice)

    def plan_data_parallel(self, tokens: Sequence[int]) -> SharedSplit | Decline:
        """Decide for all data parallel ranks, from nothing but the number of *tokens* of each [ranks]."""
        if self.config.mode == "off":
            return OFF
        if self._planner is not None:
            return self._planner.choose_data_parallel(tokens, self.config)
        sizes = self._thresholds.choose_data_parallel(tokens, self.config.parts)
        return sizes if isinstance(sizes, Decline) else Cut(sizes=sizes)

    def choose_nano_batches(self, tokens: Sequence[int]) -> SharedSplit | Decline:
        """Decide how to cut a step into nano-batches, from nothing but the number of *tokens* of each rank [ranks]."""
        if self.config.mode == "off":
            return OFF
        unable = self._nano.check() or self._thresholds.check_tokens(max(tokens))
        if unable is not None:
            return unable
        if self._planner is not None:
            return self._planner.choose_unread(tokens, self.config)
        count = self.config.micro_batches or NANO_BATCHES
        sizes = share_nano_batches(tokens, count)
        return sizes if isinstance(sizes, Decline) else Cut(sizes=sizes, nano_batches=count)

    def plan_dummy(self, sizes: Sequence[int]) -> ExecutionPlan | Decline:
        """Plan a dummy batch in micro-batches of these *sizes*, in tokens; in nano-batches where only these serve."""
        if self.config.split == "nano":
            return self._nano.check() or self.plan_nano_batches(sizes)
        return self.plan(Batch(tuple(sizes), 0), list(accumulate(sizes))[:-1])

    def plan_nano_batches(self, sizes: Sequence[int], choice: SplitChoice | None = None) -> ExecutionPlan:
        """Return the plan that runs a step in nano-batches of these *sizes*, in tokens [nano-batches].

        It has the order of the planner's *choice* if there is one. A single nano-batch is the step itself.

        Raises:
            ProgramError: if the program cannot be cut.
            ScheduleError: if the schedule is not safe.
        """
        whole, nano_batches = slice_nano_batches([sum(sizes)]), slice_nano_batches(sizes)
        if choice is None:
            name = f"nano-{name_policy(*self.config.policy)}"
            schedule = self._nano.get(len(sizes), self.config.policy)
            return ExecutionPlan(whole, self._cache.get_by_name(name, len(sizes), schedule), nano_batches=nano_batches)
        executor = self._cache.get_by_name(choice.order.name, 1, choice.order.schedule)
        parts = nano_batches if len(sizes) > 1 else ()
        return ExecutionPlan(whole, executor, choice.prediction.split, choice.trial_class, parts)

    def run(
        self, plan: ExecutionPlan, inputs: Inputs, enter: Enter = no_context, instrument: Instrument | None = None
    ) -> Outputs:
        """Run a plan, and return the outputs of each of its `parts`; see `Executor.run`.

        Profilers show a range for each op if the settings ask for ranges.
        """
        ranges = self.device.find_ranges(self.config.ranges)
        try:
            with open_step(ranges, plan):
                outputs = plan.executor.run(inputs, enter, instrument, ranges)
        except Exception as error:
            # vLLM's executors pass on only the text of an error, without notes. So log here where it happened.
            self.log.error("a split step failed", error=repr(error), where=get_context(error))
            raise
        if plan.mode == "split":
            self.statistics.split += 1
            self.statistics.micro_batches += len(plan.slices)
        elif plan.mode == "nano":
            self.statistics.nano += 1
            return group_outputs(outputs[0], len(plan.nano_batches))
        else:
            self.statistics.concurrent += 1
        return outputs

    def decline(self, decline: Decline) -> None:
        """Count a step that is not split; log the first of each reason."""
        count_declined(self.log, self.statistics.declined, decline)

    def decline_all(self, decline: Decline) -> None:
        """Log that no further step is split, and that these steps are not counted."""
        note_standing(self.log, decline)

    def close(self) -> None:
        """End the device's threads. Plans made so far cannot be run any more."""
        self._executors.clear()
        self._sanitized.clear()
        self.device.close()

    def _bind(
        self, slices: tuple[BatchSlice, ...] | Decline, choice: SplitChoice | None = None
    ) -> ExecutionPlan | Decline:
        """Return the plan that runs these slices, in the order of the planner's *choice* if there is one."""
        if isinstance(slices, Decline):
            return slices
        if choice is not None and choice.cut.nano_batches:
            return self.plan_nano_batches(split_evenly(slices[-1].last_token, choice.cut.nano_batches), choice)
        if choice is not None:
            executor = self._get_executor(len(slices), choice.order)
            return ExecutionPlan(slices, executor, choice.prediction.split, choice.trial_class)
        if len(slices) < 2 and not self.forces_side:
            return Decline("nowhere to cut", "no cuts were given")
        return ExecutionPlan(slices, self._get_executor(len(slices)))

    def _get_executor(self, micro_batches: int, order: NamedOrder | None = None) -> Executor:
        """Return the executor of an order, or of the policy of the settings; make it if it is new.

        With `DBO_CHECK=races`, half of the split steps use the order that exposes a missing `ordered=True`. The
        Thue-Morse sequence picks these steps, because it has no period that steps could share.
        """
        if order is not None:
            program = order.programs[0]
        else:
            program = self.program if self.forces_side else self.program.fold_side()
        if self.config.check is Check.RACES and self.statistics.split.bit_count() % 2:
            return self._cache.get_by_policy(program, micro_batches, (LATEST_FIRST, 0))
        if order is not None:
            return self._cache.get_by_name(order.name, len(order.programs), order.schedule)
        policy = keep_layers(self.config.policy) if self.keeps_layers else self.config.policy
        return self._cache.get_by_policy(program, micro_batches, policy)
