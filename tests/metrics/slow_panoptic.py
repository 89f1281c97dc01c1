"""Panoptic quality, segment by segment, with one mask for each: slow and obvious."""

import numpy as np


def slow_panoptic_quality(pairs, is_thing):
    """`pairs` of (predicted, true), each (map of ids, {id: (label, is a crowd)}); id 0 is void."""
    overlaps = {c: [] for c in range(len(is_thing))}
    wrong = dict.fromkeys(overlaps, 0)
    missed = dict.fromkeys(overlaps, 0)
    for (predicted_map, predicted), (true_map, true) in pairs:
        void = true_map == 0
        matched = set()
        for true_id, (true_label, crowd) in true.items():
            if crowd:
                continue
            mask = true_map == true_id
            partner = None
            for predicted_id, (label, _) in predicted.items():
                other = (predicted_map == predicted_id) & ~void
                if label == true_label and (mask & other).sum() / (mask | other).sum() > 0.5:
                    partner = predicted_id
                    overlaps[label].append((mask & other).sum() / (mask | other).sum())
            if partner is None:
                missed[true_label] += 1
            matched.add(partner)
        for predicted_id, (label, _) in predicted.items():
            mask = predicted_map == predicted_id
            crowds = [k for k, (crowd_label, crowd) in true.items() if crowd and crowd_label == label]
            excuse = void | (true_map == crowds[-1]) if crowds else void
            if predicted_id not in matched and (mask & excuse).sum() / mask.sum() <= 0.5:
                wrong[label] += 1
    rows = {}
    for c in overlaps:
        weight = len(overlaps[c]) + wrong[c] / 2 + missed[c] / 2
        if weight:
            sq = np.mean(overlaps[c]) if overlaps[c] else 0.0
            rows[c] = (sum(overlaps[c]) / weight, sq, len(overlaps[c]) / weight)
    groups = (list(rows), [c for c in rows if is_thing[c]], [c for c in rows if not is_thing[c]])
    return np.concatenate([np.mean([rows[c] for c in group], axis=0) if group else [np.nan] * 3 for group in groups])
