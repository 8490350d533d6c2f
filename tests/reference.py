"""The mixture in NumPy float64, position by position, with the gradients written out by hand.

Shares no code with the package. Gradients are those of ``loss = -sum_t weight_t log p(y_t)``.
"""

import numpy as np


def _lse(x):
    return np.max(x) + np.log(np.sum(np.exp(x - np.max(x))))


def _log_sigmoid(x):
    return min(x, 0.0) - np.log1p(np.exp(-abs(x)))


def mixture(case, gate):
    """Returns log p (batch, length, vocabulary), responsibilities, and the loss's gradients."""
    logits, query, key, term = (case[n].astype(np.float64) for n in ("logits", "query", "key", "gate_term"))
    tokens, targets, segments = case["tokens"], case["targets"], case["segment_ids"]
    batch, length, vocabulary = logits.shape
    root = np.sqrt(query.shape[-1])
    log_p = np.zeros_like(logits)
    responsibility = np.zeros((batch, length))
    grads = {
        n: np.zeros_like(v)
        for n, v in (("logits", logits), ("query", query), ("key", key), ("gate_term", term))
    }
    for b in range(batch):
        for t in range(length):
            w, y, z = case["weights"][b, t], targets[b, t], logits[b, t]
            p_lm_log = z - _lse(z)
            p_lm = np.exp(p_lm_log)
            onehot = np.eye(vocabulary)[y]
            valid = [j for j in range(t + 1) if segments[b, j] == segments[b, t] and case["candidate"][b, j]]
            if not valid:
                log_p[b, t] = p_lm_log
                grads["logits"][b, t] = w * (p_lm - onehot)
                continue
            e = np.array([query[b, t] @ key[b, j] / root for j in valid])
            total = _lse(e)
            if gate == "learned":
                g = term[b, t]
            elif gate == "sentinel":
                g = total - term[b, t]
            else:
                g = total + term[b, t] - _lse(z)
            for v in range(vocabulary):
                same = e[[tokens[b, j] == v for j in valid]]
                log_copy = _lse(same) - total if same.size else -np.inf
                log_p[b, t, v] = np.logaddexp(_log_sigmoid(-g) + p_lm_log[v], _log_sigmoid(g) + log_copy)
            is_y = np.array([tokens[b, j] == y for j in valid])
            if is_y.any():
                match = _lse(e[is_y])
                r = np.exp(_log_sigmoid(g) + match - total - log_p[b, t, y])
                within = np.where(is_y, np.exp(np.where(is_y, e - match, -np.inf)), 0.0)
            else:
                r, within = 0.0, np.zeros_like(e)
            responsibility[b, t] = r
            softmax = np.exp(e - total)
            d_gate = np.exp(_log_sigmoid(g)) - r
            d_scores = -r * (within - softmax)
            d_logits = (1 - r) * (p_lm - onehot)
            if gate == "learned":
                d_term = d_gate
            elif gate == "sentinel":
                d_term, d_scores = -d_gate, d_scores + d_gate * softmax
            else:
                d_term, d_scores = d_gate, d_scores + d_gate * softmax
                d_logits = d_logits - d_gate * p_lm
            grads["logits"][b, t] = w * d_logits
            grads["gate_term"][b, t] = w * d_term
            for j, d in zip(valid, d_scores, strict=True):
                grads["query"][b, t] += w * d * key[b, j] / root
                grads["key"][b, j] += w * d * query[b, t] / root
    return log_p, responsibility, grads
