"""Convert a model's output to JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ModelError, WireError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models.plain import softmax
from hepti_mqtt.protocol.messages import LOGPROBS, THINKING
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.runtime.coordinator.transcriptions import Transcription
from hepti_mqtt.service.detokenizer import WrittenText
from hepti_mqtt.service.logprobs import described
from hepti_mqtt.service.requests import ModelInput
from hepti_mqtt.service.speech import transcript
from hepti_mqtt.service.task_outputs import Floats, best, labelled, sigmoid, unit
from hepti_mqtt.service.thinking import divide


def decode_output(
    checkpoint: Checkpoint,
    prepared: ModelInput,
    output: npt.NDArray[Any],
    plan: Plan | None = None,
    generation: Generation | None = None,
    before: Sequence[npt.NDArray[Any]] = (),
) -> dict[str, Any]:
    """Return the JSON answer for a model's output of the spec's `output_shape`.

    {"embedding": [h numbers, or the request's dimensions]}; {"labels": [{"label", "score"}]} best first; {"masks":
    [{"position", "tokens": [{"token", "id", "score"}]}]} with the position in the sequence; {"dtype", "shape",
    "base64"} for hidden states. {"ids", "text", "finish"} of generated tokens, with "logprobs" and "thinking" if the
    request wants them; {"map": {"dtype", "shape", "base64"}} for a feature map with pixels as rows; for a
    question, its results. A request with a list (texts, pairs, images, lists of ids) has {"results": [one per input]},
    except hidden states, which are packed [m, h]. Raises WireError for an output of another shape, ModelError for NaN
    and infinity. plan: of the run. generation: of the tokens. before: outputs of other models for the question.
    """
    spec, shape = checkpoint.spec, prepared.shape
    if isinstance(generation, Transcription) and not generation.wants_states and prepared.rules.scored:
        return transcript(checkpoint, prepared, generation)
    if prepared.new_tokens:
        ids, written = output.tolist(), WrittenText(checkpoint, prepared.stop)
        text = written.extend_to(ids)
        rest, stopped = written.end()
        has_ended = stopped or len(ids) < prepared.new_tokens or prepared.rules.ends(ids)
        result = {"ids": ids, "text": text + rest, "finish": "stop" if has_ended else "length"}
        if prepared.thoughts is not None:
            result[THINKING], result["text"] = divide(text + rest, prepared.thoughts)
        if prepared.rules.likely >= 0 and generation is not None:
            result[LOGPROBS] = [described(checkpoint, likely) for likely in generation.text.likely]
        return result
    if output.shape != spec.output_shape(shape):
        raise WireError(
            f"the devices answered with shape {list(output.shape)} instead of {list(spec.output_shape(shape))}; "
            "use the same version of Hepti and of the model on all devices"
        )
    values = np.concatenate([*before, output]).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ModelError(f"Model {checkpoint.model} produced NaN or infinity{_narrow_numbers(plan)}")
    if shape.want == "hidden":
        return _numbers(values)
    question = prepared.question
    results = (
        _RESULTS[spec.head.task](checkpoint, prepared, values)
        if question is None
        else question.results(checkpoint, shape, _shortened(checkpoint, prepared, values))
    )
    for place in prepared.empty:
        results.insert(place, {"embedding": [0.0] * (prepared.dimensions or values.shape[1])})
    return {"results": results} if prepared.is_list else results[0]


def _narrow_numbers(plan: Plan | None) -> str:
    """Return the possible cause of NaN or infinity in an answer, and the remedy."""
    dtypes = {} if plan is None else {"weights": plan.weight_dtype, "wire": plan.wire}
    narrow = {key: dtype for key, dtype in dtypes.items() if dtype != "f32"}
    if not narrow:
        return ". Check the checkpoint: hepti model verify DIR."
    held = " and ".join(f"{key} in {dtype}" for key, dtype in narrow.items())
    limit = ", which holds numbers up to 65,504" if "f16" in narrow.values() else ""
    return f" with {held}{limit}. Use {' and '.join(f'--{key} f32' for key in narrow)}."


def to_json(result: Mapping[str, Any]) -> str:
    """Return a result as JSON text; embeddings have nine digits, enough to distinguish any two f32.

    This is three times faster than `json.dumps` with its 17 digits, and a third shorter.
    """
    match result:
        case {"embedding": [*numbers]}:
            text = ", ".join(["%.9g"] * len(numbers)) % tuple(numbers)
            return f'{{"embedding": [{text}]}}'
        case {"results": [*results]}:
            return f'{{"results": [{", ".join(map(to_json, results))}]}}'
        case _:
            return json.dumps(result, allow_nan=False)


def _numbers(values: Floats) -> dict[str, Any]:
    data = base64.b64encode(values.astype("<f4", copy=False).tobytes()).decode()
    return {"dtype": "f32", "shape": list(values.shape), "base64": data}


def _shortened(checkpoint: Checkpoint, prepared: ModelInput, output: Floats) -> Floats:
    """Return embeddings cut to the request's dimensions, normalized again if the model's embeddings are."""
    if not prepared.dimensions:
        return output
    cut = output[:, : prepared.dimensions]
    return unit(cut) if checkpoint.spec.head.normalize else cut


def _labels(checkpoint: Checkpoint, prepared: ModelInput, output: Floats) -> list[dict[str, Any]]:
    scores = output if prepared.raw_scores else _scores(checkpoint, output)
    return labelled(checkpoint.spec.head.labels, scores, prepared.top_k)


def _masks(checkpoint: Checkpoint, prepared: ModelInput, output: Floats) -> list[dict[str, Any]]:
    token_of = checkpoint.tokenizer.id_to_token
    results: list[dict[str, Any]] = [{"masks": []} for _ in prepared.shape.sizes]
    for (item, place), logits in zip(prepared.shape.mask_positions, softmax(output), strict=True):
        tokens = [{"token": token_of(i), "id": i, "score": float(logits[i])} for i in best(logits, prepared.top_k)]
        results[item]["masks"].append({"position": place, "tokens": tokens})
    return results


_RESULTS: Final[Mapping[str, Callable[[Checkpoint, ModelInput, Floats], list[dict[str, Any]]]]] = {
    "embedding": lambda c, prepared, output: [{"embedding": row.tolist()} for row in _shortened(c, prepared, output)],
    "classification": _labels,
    "image_classification": _labels,
    "feature_map": lambda _, prepared, output: [
        {"map": _numbers(rows)} for rows in np.split(output, len(prepared.shape.sizes))
    ],
    "masked_token": _masks,
}


def _scores(checkpoint: Checkpoint, logits: Floats) -> Floats:
    """Return scores by the model's problem type: softmax, sigmoid per label, or the logits (regression)."""
    problem = checkpoint.config.get("problem_type")
    if problem == "regression" or logits.shape[1] == 1:
        return logits
    if problem == "multi_label_classification":
        return sigmoid(logits)
    return softmax(logits)
