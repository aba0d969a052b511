"""The measures of locality by plain loops, as an oracle."""

import math

NOTHING = 2**-23
"""A mass that float32 cannot tell from none beside 1."""


def naive_measures(attention, grid, num_prefix, prefix="renormalise", unit="fraction", entropy="patches", patch=(1, 1)):
    """Measures of one (T, T) map in float64; a list over its query patches for each, None where undefined."""
    rows, columns = grid
    places = [(r, c) for r in range(rows) for c in range(columns)]
    sides = (1 / max(1, rows - 1), 1 / max(1, columns - 1))
    height, width = {"pixels": patch, "sides": sides}.get(unit, (1, 1))
    longest = math.hypot(rows - 1, columns - 1) if unit == "fraction" else 1
    found = {}

    def put(name, value):
        found.setdefault(name, []).append(value)

    for i, (r, c) in enumerate(places):
        row = attention[num_prefix + i].double().tolist()
        front, patches = row[:num_prefix], row[num_prefix:]
        distance = [math.hypot((r - y) * height, (c - x) * width) / longest for y, x in places]
        mass, own = sum(patches), patches[i]
        near = [a for a, (y, x) in zip(patches, places, strict=True) if max(abs(y - r), abs(x - c)) == 1]
        dropped = sum(a * d for a, d in zip(patches, distance, strict=True))
        others = mass - own + (sum(front) if prefix == "include" else 0)
        scaled = {"renormalise": 1, "drop": mass, "include": 1}[prefix]
        put(
            "mad",
            {"renormalise": dropped / mass if mass > NOTHING else None, "drop": dropped, "include": dropped}[prefix],
        )
        put("mad_without_self", dropped / others * scaled if others > NOTHING else None)
        put("mad_dropped", dropped)
        over_patches = -sum(a / mass * math.log(a / mass) for a in patches if a) if mass > NOTHING else None
        over_tokens = -sum(a * math.log(a) for a in row if a)
        chosen, keys = (over_patches, len(patches)) if entropy == "patches" else (over_tokens, len(row))
        put("entropy", None if chosen is None else chosen / math.log(keys))
        put("entropy_tokens", over_tokens / math.log(len(row)))
        put("effective_tokens", None if chosen is None else math.exp(chosen))
        put("self_mass", own)
        put("neighbour_mass", sum(near))
        put("prefix_mass", sum(front))
        put("empty_rows", float(mass <= NOTHING))
    return found


def naive_means(attention, grid, num_prefix, **conventions):
    """Mean of each measure per head of (B, h, T, T) maps."""
    heads = []
    for head in range(attention.shape[1]):
        rows = {}
        for image in range(attention.shape[0]):
            for name, values in naive_measures(attention[image, head], grid, num_prefix, **conventions).items():
                rows.setdefault(name, []).extend(v for v in values if v is not None)
        heads.append({name: sum(values) / len(values) if values else None for name, values in rows.items()})
    return {name: [head[name] for head in heads] for name in heads[0]}
