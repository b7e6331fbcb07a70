"""Runs requests: checks them, admits them, runs them at workers, and counts them."""

from __future__ import annotations

import time
from typing import Protocol

from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.caller import current_caller
from kvrouter.frontend.access.request_admission import AdmittedRequest, RequestAdmission
from kvrouter.frontend.access.rules import check_generation
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.recording.popular_prefixes import PopularPrefixes
from kvrouter.frontend.recording.recorder import Recorder
from kvrouter.frontend.request.attempt_budget import AttemptBudget, migration_blocker
from kvrouter.frontend.request.conversation_ids import ConversationIds
from kvrouter.frontend.request.gen_ai import TEXT_COMPLETION, GenAiMetrics
from kvrouter.frontend.request.generation import Generation
from kvrouter.frontend.request.model_pools import fitting_pools
from kvrouter.frontend.request.prefill_stage import Disaggregation
from kvrouter.frontend.request.progress import OutputReceiver
from kvrouter.frontend.request.request_checks import Limits, check_request, check_vocabulary
from kvrouter.frontend.request.served_models import RequestPools, ServedModels
from kvrouter.frontend.schedulers.link_pool import PoolChoice, SchedulerLinks
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.frontend.workers.client import WorkerClient, Workers
from kvrouter.frontend.workers.poison_prompts import PoisonPrompts, RequestDeaths
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import KvRouterError

_FORWARDED = "it was forwarded as it is: the tokens of its output are not known"


class Forwarding(Workers, Protocol):
    """Starts the attempts of a request whose prompt the engine reads itself."""

    @property
    def is_estimated(self) -> bool:
        """Whether the length of its prompt is an estimate."""

    @property
    def sequences(self) -> int:
        """Number of sequences the engine computes."""

    @property
    def operation(self) -> str:
        """Its operation, in the words of the GenAI conventions."""

    counted_prompt_tokens: int | None
    """Tokens of its prompt as the engine counted them; None until it reports them."""


class RequestRunner:
    """Runs the requests of all APIs of a Frontend."""

    def __init__(
        self,
        models: ServedModels,
        links: SchedulerLinks,
        workers: WorkerClient,
        metrics: FrontendMetrics,
        settings: FrontendSettings,
        *,
        admission: RequestAdmission,
        disaggregation: Disaggregation,
        poison_prompts: PoisonPrompts,
        gen_ai: GenAiMetrics,
        recorder: Recorder | None = None,
        popular_prefixes: PopularPrefixes | None = None,
        access: Access | None = None,
    ) -> None:
        self.poison_prompts = poison_prompts
        """The prompts that saw deaths of workers."""
        self.settings = settings
        self.limits = Limits(settings.max_prompt_tokens, settings.max_output_tokens)
        self.workers = workers
        """The connections to workers."""
        self.admission = admission
        """Admits requests within limits."""
        self.popular_prefixes = popular_prefixes
        """Counts the prefixes of prompts; None to count none."""
        self.pool_choice = PoolChoice(links)
        """Chooses among several components of a model."""
        self.models = models
        self.links = links
        self.metrics = metrics
        self.conversations = ConversationIds(settings.session_headers, metrics.ignored_sessions)
        self._recorder = recorder
        self.access = access
        self._disaggregation = disaggregation
        self._gen_ai = gen_ai
        self._in_flight = 0
        metrics.in_flight.set_function(lambda: self._in_flight)

    async def run(
        self,
        request: GenerateRequest,
        prompt: bytes,
        receiver: OutputReceiver,
        *,
        deadline: Deadline | None = None,
        through: Forwarding | None = None,
        operation: str = TEXT_COMPLETION,
    ) -> None:
        """Routes a request and runs it to its end; the receiver gets its output. Cancelling the task aborts it.

        Args:
            request: The request, without token ids.
            prompt: Its prompt, as a packed buffer.
            receiver: Receives the output.
            deadline: Deadline of the request; None for the longest.
            through: Starts the attempts of a request that has been checked; None for the Generate of workers.
            operation: Its operation in the words of the GenAI conventions; ``through`` has its own.

        Raises:
            PoisonPrompt: workers died of it.
            KvRouterError: the request is invalid, cannot be routed, or lost its worker; or an error of the receiver.
        """
        longest = self.settings.request_timeout_seconds
        deadline = Deadline.after(longest) if deadline is None else deadline.or_after(longest)
        known_model, code = "", "CANCELLED"
        began_ns = time.perf_counter_ns()
        generation: Generation | None = None
        deaths: RequestDeaths | None = None
        admitted: AdmittedRequest | None = None
        tokens = len(prompt) // TOKEN_BYTES
        workers: Workers = self.workers
        is_estimated, sequences = False, 1
        if through is not None:
            workers, is_estimated, sequences = through, through.is_estimated, through.sequences
            operation = through.operation
        self._in_flight += 1
        try:
            access = self.access
            if access is not None and through is None:
                access.enforce(
                    lambda caller: check_generation(caller, request, access.fields, access.salts), "Generate"
                )
            views, lora_name, _ = self.models.resolve(request.model)
            known_model = views[0].model
            caller = current_caller()
            tenant = request.tenant if caller is None else caller.tenant
            deaths = RequestDeaths(self.poison_prompts, tenant, known_model, prompt, request.multimodal_hashes)
            if lora_name:
                request.use_adapter(known_model, lora_name)
            view, pools = views[0], None
            if len(views) > 1:
                pools = self._pools_of(request, tokens, lora_name or known_model, through, deaths)
                view = pools.largest()
            if through is None:
                check_request(request, tokens, view, self.limits)
                if vocabulary := self.models.texts.vocabulary_size(known_model):
                    stops = request.stop.stop_token_ids
                    check_vocabulary(prompt, vocabulary, "token_ids")
                    check_vocabulary(stops, vocabulary, "stop_conditions.stop_token_ids")
            deaths.check()
            admitted = self.admission.admit(views, tokens, request.stop.max_tokens, "Generate", sequences=sequences)
            if pools is not None:
                # Only now, since this asks Schedulers.
                view = await pools.cheapest(prompt, deadline)
            generation = Generation(
                request,
                prompt,
                view,
                self.links,
                workers,
                self.metrics,
                self._budget(request, through),
                deaths,
                self._disaggregation.stage(view, workers, deaths),
                pools,
                self.settings.pool_restart_seconds,
                is_estimated=is_estimated,
                operation=operation,
            )
            await generation.run(receiver, deadline)
            code = "OK"
        except KvRouterError as error:
            code = error.code.name
            raise
        finally:
            ended_ns = time.perf_counter_ns()
            self._in_flight -= 1
            counted = through.counted_prompt_tokens if through is not None and is_estimated else None
            output_tokens, was_sent = (0, False) if generation is None else (generation.output_tokens, generation.sent)
            if deaths is not None:
                deaths.end(survived=code == "OK")
            if admitted is not None:
                admitted.end(output_tokens, sent=was_sent, prompt_tokens=counted)
            self.metrics.ended(known_model, code)
            if known_model:
                failure, seconds = "" if code == "OK" else code, (ended_ns - began_ns) / 1e9
                counts = self._gen_ai.of(operation, known_model)
                counts.ended(failure, seconds, counted if is_estimated else tokens, generation)
            if generation is not None:
                if code == "OK":
                    generation.model_metrics.request_seconds.observe((ended_ns - generation.arrived_ns) / 1e9)
                self._note(generation)

    def _note(self, generation: Generation) -> None:
        """Gives an ended request to those that observe the traffic."""
        prefixes = self.popular_prefixes
        is_counted = prefixes is not None and prefixes.wants_next()
        if (self._recorder is None and not is_counted) or (outline := generation.outline()) is None:
            return
        if self._recorder is not None:
            self._recorder.note(outline)
        if prefixes is not None and is_counted:
            prefixes.note(outline)

    def _budget(self, request: GenerateRequest, through: Workers | None) -> AttemptBudget:
        limit = self.settings.migration_limit
        if request.migration_limit is not None:
            limit = min(limit, request.migration_limit)
        return AttemptBudget(
            max_attempts=self.settings.max_attempts,
            migration_limit=limit,
            pinned=request.constraints is not None and "worker_id" in request.constraints,
            migration_blocker=migration_blocker(request.sampling) if through is None else _FORWARDED,
        )

    def _pools_of(
        self,
        request: GenerateRequest,
        tokens: int,
        model: str,
        through: Forwarding | None,
        deaths: RequestDeaths,
    ) -> RequestPools:
        """Returns the pools that can serve a request, of which there are several now.

        Args:
            request: The request.
            tokens: Tokens of its prompt.
            model: Its model or LoRA adapter.
            through: Starts the attempts at workers with an OpenAI API; None for any worker.
            deaths: Counts the workers that die of it.
        """
        return RequestPools(
            request,
            lambda: fitting_pools(request, tokens, self.models.pools(model, forwarding=through is not None)),
            self.pool_choice,
            self.workers.health,
            lambda view: self._disaggregation.stage(view, through or self.workers, deaths),
            is_estimated=through is not None and through.is_estimated,
        )
