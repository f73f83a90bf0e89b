"""Agent loop of the agent example, which retries a sum until it is right and returns one sample per turn.

For verl's ``actor_rollout_ref.rollout.agent.agent_loop_config_path``. After a wrong answer a checker replies whether it
is too small or too large. Each sample's prompt is the conversation so far. verl gives every sample of a session the
last one's reward and, under GRPO, its advantage.
"""

import os
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

MAX_TURNS = int(os.environ.get("MAX_TURNS", "4"))


def checked(reply: str, answer: str) -> str:
    """Return the checker's reply to a wrong answer, without digits, which a tiny model would learn to repeat."""
    if not reply.isdigit():
        return "No digits."
    return "Too small." if int(reply) < int(answer) else "Too large."


class TurnwiseAgentLoop(AgentLoopBase):
    """A session of up to ``MAX_TURNS`` turns."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Return a sample per turn; ``kwargs`` are the data set's fields, among them ``raw_prompt``."""
        messages, answer = list(kwargs["raw_prompt"]), kwargs["reward_model"]["ground_truth"]
        prompt_ids = await self.ct_build_initial_tokens(messages)
        samples: list[AgentLoopOutput] = []
        while len(samples) < MAX_TURNS:
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
            length = self.rollout_config.response_length
            response_ids = output.token_ids[:length]
            samples.append(
                AgentLoopOutput(
                    prompt_ids=prompt_ids,
                    response_ids=response_ids,
                    response_mask=[1] * len(response_ids),
                    response_logprobs=output.log_probs[:length] if output.log_probs else None,
                    num_turns=2 * len(samples) + 2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={**output.extra_fields, "turn_scores": [], "tool_rewards": []},
                )
            )
            reply = self.tokenizer.decode(response_ids, skip_special_tokens=True)
            if reply == answer:
                break
            merged, _, _ = await self.ct_merge_assistant_token(prompt_ids, response_ids, [])
            before = [*messages, {"role": "assistant", "content": reply}]
            messages = [*before, {"role": "user", "content": checked(reply, answer)}]
            merged, _, _ = await self.ct_merge_context_msg(before, messages, merged.token_ids, [])
            if len(merged.token_ids) > self.rollout_config.prompt_length:
                break
            prompt_ids = merged.token_ids
        return samples
