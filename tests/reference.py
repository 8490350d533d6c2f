"""The mixture in NumPy float64, position by position, with the gradients written out by hand.

Shares no code with the package. Gradients are those of ``loss = -sum_t weight_t log p(y_t)``.
"""

import numpy as np


def _lse(x):
    if not len(x) or np.max(x) == -np.inf:
        return -np.inf
    return np.max(x) + np.log(np.sum(np.exp(x - np.max(x))))


def _softmax(x):
    return np.exp(x - _lse(x))


INPUTS = ("hidden", "matrix", "query", "key", "gate_term", "recency", "confidence")


def mixture(case, gate):
    """Returns log p (batch, length, vocabulary), a dict of terms (batch, length), and the gradients."""
    inputs = {n: case[n].astype(np.float64) for n in INPUTS if n in case}
    hidden, matrix, query, key, term = (inputs[n] for n in INPUTS[:5])
    tokens, targets, segments = case["tokens"], case["targets"], case["segment_ids"]
    batch, length = tokens.shape
    pointers, root = query.shape[2], np.sqrt(query.shape[3])
    log_p = np.zeros((batch, length, len(matrix)))
    terms = {n: np.zeros((batch, length)) for n in ("gate", "responsibility", "log_copy", "lm_log_total")}
    grads = {n: np.zeros_like(v) for n, v in inputs.items()}
    for b, t in np.ndindex(batch, length):
        y, z = targets[b, t], matrix @ hidden[b, t]
        valid = [j for j in range(t + 1) if segments[b, j] == segments[b, t] and case["copyable"][b, j]]
        distance = t - np.array(valid, float)
        e = np.array([[query[b, t, p] @ key[b, j, p] / root for j in valid] for p in range(pointers)])
        e = e.reshape(pointers, len(valid))
        if "recency" in inputs:
            e = e - inputs["recency"][:, None] * distance
        position = {"z": z, "e": e, "ids": tokens[b, valid], "y": y, "term": term[b, t]}
        if gate.startswith("context_logits"):
            out = _context_position(**position, summed=gate.endswith("sum"))
        else:
            out = _gated_position(**position, gate=gate, confidence=inputs.get("confidence"))
        log_p[b, t] = out["log_p"]
        for n in terms:
            terms[n][b, t] = out[n]
        w = case["weights"][b, t]
        grads["hidden"][b, t] = w * out["d_z"] @ matrix
        grads["matrix"] += w * np.outer(out["d_z"], hidden[b, t])
        grads["gate_term"][b, t] = w * out["d_term"]
        if "confidence" in grads:
            grads["confidence"] += w * out["d_confidence"]
        d_e = w * out["d_e"]
        if "recency" in grads:
            grads["recency"] -= d_e @ distance
        for p in range(pointers):
            for j, d in zip(valid, d_e[p], strict=True):
                grads["query"][b, t, p] += d * key[b, j, p] / root
                grads["key"][b, j, p] += d * query[b, t, p] / root
    return log_p, terms, grads


def _gated_position(z, e, ids, y, term, confidence, gate):
    """One position of section 2: the formula for P pointers, and its gradients."""
    pointers, candidates = e.shape
    log_lm, p_lm, onehot = z - _lse(z), _softmax(z), np.eye(len(z))[y]
    out = {"lm_log_total": _lse(z), "d_term": np.zeros(pointers), "d_e": np.zeros_like(e)}
    out["d_confidence"] = np.zeros((2, pointers))
    if not candidates:
        return out | {
            "log_p": log_lm,
            "gate": 0.0,
            "responsibility": 0.0,
            "log_copy": -np.inf,
            "d_z": p_lm - onehot,
        }
    total = np.array([_lse(row) for row in e])
    softmax = np.array([_softmax(row) for row in e])
    mean = np.sum(softmax * (e - total[:, None]), axis=1)  # minus the entropy
    g = {
        "learned": lambda: term,
        "sentinel": lambda: total - term,
        "shared_softmax": lambda: total + term - _lse(z),
        "confidence": lambda: term + confidence[0] * total - confidence[1] * mean,
    }[gate]()
    log_weights = np.concatenate([[0.0], g]) - _lse(np.concatenate([[0.0], g]))
    log_p = np.full(len(z), -np.inf)
    for v in range(len(z)):
        heads = [log_lm[v], *(_lse(row[ids == v]) - a for row, a in zip(e, total, strict=True))]
        log_p[v] = _lse(log_weights + np.array(heads))
        if v == y:
            shares = np.exp(log_weights + np.array(heads) - log_p[v])
            out["log_copy"] = _lse(log_weights[1:] + heads[1:]) - _lse(log_weights[1:])
    d_gate = np.exp(log_weights[1:]) - shares[1:]
    within = np.zeros_like(e)
    for p in range(pointers):
        if (ids == y).any():
            within[p, ids == y] = _softmax(e[p, ids == y])
    d_e = -shares[1:, None] * (within - softmax)
    d_z = shares[0] * (p_lm - onehot)
    d_term = d_gate
    if gate == "sentinel":
        d_term, d_e = -d_gate, d_e + d_gate[:, None] * softmax
    elif gate == "shared_softmax":
        d_e, d_z = d_e + d_gate[:, None] * softmax, d_z - np.sum(d_gate) * p_lm
    elif gate == "confidence":
        of_entropy = -softmax * ((e - total[:, None]) - mean[:, None])
        d_e = (
            d_e + (d_gate * confidence[0])[:, None] * softmax + (d_gate * confidence[1])[:, None] * of_entropy
        )
        out["d_confidence"] = np.stack([d_gate * total, -d_gate * mean])
    return out | {
        "log_p": log_p,
        "gate": np.exp(_lse(log_weights[1:])),
        "responsibility": np.sum(shares[1:]),
        "d_z": d_z,
        "d_e": d_e,
        "d_term": d_term,
    }


def _context_position(z, e, ids, y, term, summed):
    """One position of the other mixture: copy scores are added to the logits of the tokens they stand for."""
    scores = e + term[:, None]
    adjusted, present = z.copy(), np.unique(ids)
    for v in present:
        here = scores[:, ids == v]
        adjusted[v] += here.sum() if summed else _lse(here.ravel())
    log_p = adjusted - _lse(adjusted)
    d_z = np.exp(log_p) - np.eye(len(z))[y]
    d_scores = np.zeros_like(e)
    for v in present:
        here = scores[:, ids == v]
        d_scores[:, ids == v] = d_z[v] * (1.0 if summed else np.exp(here - _lse(here.ravel())))
    return {
        "log_p": log_p,
        "gate": np.exp(log_p[present]).sum(),
        "responsibility": (1 - np.exp(min(0.0, z[y] - _lse(z) - log_p[y]))) * (y in present),
        "log_copy": _lse(scores[:, ids == y].ravel()) - _lse(scores.ravel()) if y in present else -np.inf,
        "lm_log_total": _lse(z),
        "d_z": d_z,
        "d_e": d_scores,
        "d_term": d_scores.sum(axis=1),
        "d_confidence": np.zeros((2, len(e))),
    }
