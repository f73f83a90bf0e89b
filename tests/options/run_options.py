"""Losses, roles, checkpoints and rollouts, which have tests of their own."""

from tests.options.keys import ACTOR, EXACTNESS, STEPS, SUPPORT
from tests.options.option import Option

RUN_OPTIONS: tuple[Option, ...] = (
    # Losses and roles.
    Option(
        "every policy loss and aggregation of verl",
        f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=seq-mean-token-mean",
        proofs=(f"{SUPPORT}/test_losses.py",),
        note="also losses that a user registers",
    ),
    Option(
        "KL loss with a reference model",
        f"{ACTOR}.use_kl_loss=True",
        proofs=(f"{SUPPORT}/test_reference_policy.py",),
        note="the reference takes the packed path too; importance ratio 1 at step 0",
    ),
    Option(
        "KL in the reward",
        "algorithm.use_kl_in_reward=True",
        proofs=(f"{SUPPORT}/test_training_runs.py::test_options_that_real_runs_switch_on_train_together[offload",),
    ),
    Option(
        "critic",
        "algorithm.adv_estimator=gae",
        proofs=(
            "tests/engine/heads/test_value_model.py",
            f"{SUPPORT}/test_critic.py",
            f"{STEPS}/test_carry_models.py::test_values_of_carried",
            "tests/test_end_to_end.py::test_ppo_script",
        ),
        note="every option above that is not about the language-model head",
    ),
    # Checkpoints.
    Option(
        "checkpoint, resume, and resume with the mode toggled",
        "trainer.save_freq=10 trainer.resume_mode=auto",
        proofs=("tests/engine/test_two_ranks.py::test_checkpoint",),
        note="weights after the resume are bit-equal",
    ),
    Option(
        "resume after kill -9",
        "trainer.save_freq=1 trainer.resume_mode=auto",
        proofs=(f"{SUPPORT}/test_resume_after_kill.py", f"{SUPPORT}/test_training_runs.py::test_killed_run"),
    ),
    # Trainers.
    Option(
        "V0 trainer",
        "trainer.use_v1=False",
        proofs=("tests/trainer/test_v0.py", "tests/trainer/test_v0_runs.py"),
        note="any number of groups; it has no group filtering and takes one row a session",
    ),
    Option(
        "trainers of other people",
        "trainer.v1.trainer_mode=NAME",
        proofs=("tests/trainer/test_any_trainer.py",),
        note="V1 ones by the name they are registered under, V0 ones through keep_groups",
    ),
    # Rollouts.
    Option(
        "multi-turn rollouts with tool tokens",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        proofs=(
            f"{EXACTNESS}::test_every_token_and_gradient_equals_the_sequence_alone[tool",
            f"{EXACTNESS}::test_every_token_and_gradient_equals_the_sequence_alone[multi_turn",
            f"{EXACTNESS}::test_every_token_and_gradient_equals_the_sequence_alone[a_prompt_that_reaches",
        ),
    ),
    Option(
        "prompts of different lengths, varying n",
        "(what the rollout returns)",
        proofs=(f"{EXACTNESS}::test_every_token_and_gradient_equals_the_sequence_alone[uneven",),
    ),
    Option(
        "pictures and videos",
        "(a checkpoint of Qwen2.5-VL, Qwen3-VL or Qwen3.5)",
        proofs=(
            "tests/modalities/test_pictures.py",
            "tests/modalities/test_picture_options.py",
            "tests/modalities/test_picture_ranks.py",
            "tests/test_end_to_end.py::test_pictures",
        ),
        note="each distinct picture goes through the tower once per micro-batch; no critics; Qwen3.5 within 2e-5, 1e-4 "
        "for gradients that nearly cancel",
    ),
    Option(
        "group filtering (DAPO)",
        "algorithm.filter_groups.enable=True",
        proofs=(f"{SUPPORT}/test_rollouts.py::test_groups", f"{SUPPORT}/test_training_runs.py::test_group_filtering"),
        note="verl's replay buffer drops whole groups",
    ),
    Option(
        "partial and asynchronous rollouts",
        "trainer.v1.trainer_mode=colocate_async",
        proofs=(
            f"{SUPPORT}/test_rollouts.py::test_rows_of_one_prompt",
            "tests/test_end_to_end.py::test_verls_own_entry_point",
        ),
        note="rows of one prompt may arrive in different batches",
    ),
)
