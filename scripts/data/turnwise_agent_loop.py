"""The agent loop of the agent example: asks again until a sum is right, and returns one sample per turn.

For verl's ``actor_rollout_ref.rollout.agent.agent_loop_config_path``. A checker, the tool, says after each wrong answer
on which side it lies; that and the answer become part of the context, so each sample begins with all of the one before.
verl gives every sample of a session the reward, and under GRPO the advantage, of the session's last one.
"""

import os
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

MAX_TURNS = int(os.environ.get("MAX_TURNS", "4"))


def checked(reply: str, answer: str) -> str:
    """What the checker says of a wrong reply; no digits, since a tiny model would learn to repeat them."""
    if not reply.isdigit():
        return "No digits."
    return "Too small." if int(reply) < int(answer) else "Too large."


class TurnwiseAgentLoop(AgentLoopBase):
    """One session: up to ``MAX_TURNS`` questions, each with the whole conversation as its prompt."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Play the session.

        Args:
            sampling_params: of the run; one seed serves all turns.
            kwargs: fields of the data set's row, ``raw_prompt`` and ``reward_model`` among them.

        Returns:
            A sample per turn, whose prompt is the conversation so far.
        """
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
