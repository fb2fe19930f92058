"""Generate with this folder's model and random weights on two ranks, for the log lines and the trace."""

from pathlib import Path

from vllm import LLM, SamplingParams

PROMPTS = [list(range(3, 3 + length)) for length in (200, 150, 250)]


def main() -> None:
    """Run a prefill and some decodes."""
    llm = LLM(
        str(Path(__file__).parent),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 26,
        enforce_eager=True,
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling)


if __name__ == "__main__":
    main()
