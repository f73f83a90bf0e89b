"""verl's FSDP and VeOmni engines with shared prefixes."""

# Its import loads ``registration``, which must not be half loaded by then.
import verl.workers.engine  # noqa: F401
