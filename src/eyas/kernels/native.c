/* CPU kernels for few rows, where the overhead of many small tensor operations exceeds the work.
 *
 * One thread, no state, no allocation; every function has an fp32 and a bf16 form, the latter
 * rounding where the torch reference (reference.py) rounds. Vectors are those of GCC and Clang,
 * which lower them to whatever the machine has. NaN and infinity keep their meaning: the file must
 * not be compiled with -ffast-math.
 *
 * Counts and strides are in elements. H hidden, D head size of keys, V head size of values.
 */

#include "native.h"

/* ---- RMSNorm, with or without a residual to add first ---- */

INLINE void norm_row(
    const void *x, const void *delta, const void *weight, void *total, void *out, int64_t size,
    float eps, const int is_bf16
) {
    const int64_t whole = size / WIDTH * WIDTH, rest = size - whole;
    const void *in = x;
    vec squares = {0};
    for (int64_t i = 0; i < whole; i += WIDTH) {
        vec v = load(x, i, is_bf16);
        if (delta) {
            v = rounded(v + load(delta, i, is_bf16), is_bf16);
            store(total, i, v, is_bf16);
        }
        squares += v * v;
    }
    if (rest) {
        vec v = load_part(x, whole, rest, is_bf16);
        if (delta) {
            v = rounded(v + load_part(delta, whole, rest, is_bf16), is_bf16);
            store_part(total, whole, v, rest, is_bf16);
        }
        squares += v * v;
    }
    if (delta) in = total;
    const float scale = 1.0f / sqrtf(sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < whole; i += WIDTH) {
        vec v = rounded(load(in, i, is_bf16) * scale, is_bf16);
        store(out, i, v * load(weight, i, is_bf16), is_bf16);
    }
    if (rest) {
        vec v = rounded(load_part(in, whole, rest, is_bf16) * scale, is_bf16);
        store_part(out, whole, v * load_part(weight, whole, rest, is_bf16), rest, is_bf16);
    }
}

/* x: outer blocks, `stride` apart, of inner adjacent rows; out is dense. */
INLINE void rms_norm(
    const void *x, const void *weight, void *out, int64_t outer, int64_t inner, int64_t stride,
    int64_t size, float eps, const int is_bf16
) {
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < inner; i++)
            norm_row(
                at(x, o * stride + i * size, is_bf16), 0, weight, 0,
                into(out, (o * inner + i) * size, is_bf16), size, eps, is_bf16
            );
}

void rms_norm_f32(
    const void *x, const void *weight, void *out, int64_t outer, int64_t inner, int64_t stride,
    int64_t size, float eps
) {
    rms_norm(x, weight, out, outer, inner, stride, size, eps, 0);
}

void rms_norm_bf16(
    const void *x, const void *weight, void *out, int64_t outer, int64_t inner, int64_t stride,
    int64_t size, float eps
) {
    rms_norm(x, weight, out, outer, inner, stride, size, eps, 1);
}

/* total = x + delta, out = norm(total); all dense. */
#define ADD_RMS_NORM(name, is_bf16)                                                              \
    void name(                                                                                   \
        const void *x, const void *delta, const void *weight, void *total, void *out,            \
        int64_t rows, int64_t size, float eps                                                    \
    ) {                                                                                          \
        for (int64_t row = 0; row < rows; row++)                                                 \
            norm_row(                                                                            \
                at(x, row * size, is_bf16), at(delta, row * size, is_bf16), weight,              \
                into(total, row * size, is_bf16), into(out, row * size, is_bf16), size, eps,     \
                is_bf16                                                                          \
            );                                                                                   \
    }

ADD_RMS_NORM(add_rms_norm_f32, 0)
ADD_RMS_NORM(add_rms_norm_bf16, 1)

/* ---- silu(gate) * up ---- */

INLINE vec gated(vec gate, vec up, const int is_bf16) {
    return rounded(gate / (exponential(-gate) + 1.0f), is_bf16) * up;
}

INLINE void silu_mul(
    const void *x, void *out, int64_t rows, int64_t stride, int64_t size, const int is_bf16
) {
    const int64_t whole = size / WIDTH * WIDTH, rest = size - whole;
    for (int64_t row = 0; row < rows; row++) {
        const void *gate = at(x, row * stride, is_bf16), *up = at(gate, size, is_bf16);
        void *to = into(out, row * size, is_bf16);
        for (int64_t i = 0; i < whole; i += WIDTH)
            store(to, i, gated(load(gate, i, is_bf16), load(up, i, is_bf16), is_bf16), is_bf16);
        if (rest) {
            vec g = load_part(gate, whole, rest, is_bf16), u = load_part(up, whole, rest, is_bf16);
            store_part(to, whole, gated(g, u, is_bf16), rest, is_bf16);
        }
    }
}

void silu_mul_f32(const void *x, void *out, int64_t rows, int64_t stride, int64_t size) {
    silu_mul(x, out, rows, stride, size, 0);
}

void silu_mul_bf16(const void *x, void *out, int64_t rows, int64_t stride, int64_t size) {
    silu_mul(x, out, rows, stride, size, 1);
}

/* ---- rotation of q and k, and the write of k and v into the cache ---- */

INLINE void rotate_head(
    const void *x, const void *cos, const void *sin, void *out, int64_t size, int64_t rotary,
    const int is_bf16
) {
    const int64_t half_size = rotary / 2, whole = half_size / WIDTH * WIDTH;
    const int64_t rest = half_size - whole;
    for (int part = 0; part < 2; part++) {
        const int64_t here = part * half_size, there = half_size - here;
        for (int64_t i = 0; i < whole; i += WIDTH) {
            vec straight = load(x, here + i, is_bf16) * load(cos, here + i, is_bf16);
            vec crossed = load(x, there + i, is_bf16) * load(sin, here + i, is_bf16);
            store(out, here + i, rounded(straight, is_bf16) + crossed, is_bf16);
        }
        if (rest) {
            const int64_t h = here + whole, t = there + whole;
            vec straight = load_part(x, h, rest, is_bf16) * load_part(cos, h, rest, is_bf16);
            vec crossed = load_part(x, t, rest, is_bf16) * load_part(sin, h, rest, is_bf16);
            store_part(out, h, rounded(straight, is_bf16) + crossed, rest, is_bf16);
        }
    }
    memcpy(into(out, rotary, is_bf16), at(x, rotary, is_bf16), (size - rotary) * (is_bf16 ? 2 : 4));
}

INLINE void rope_write_typed(
    const RopePlan *p, const void *qkv, void *q, void *k_cache, void *v_cache, const int is_bf16
) {
    const int64_t size = p->size, v_bytes = p->num_k * p->v_size * (is_bf16 ? 2 : 4);
    for (int64_t row = 0; row < p->rows; row++) {
        const void *in = at(qkv, row * p->stride, is_bf16);
        const void *cos = at(p->cos, row * p->rotary, is_bf16);
        const void *sin = at(p->sin, row * p->rotary, is_bf16);
        for (int64_t head = 0; head < p->num_q; head++)
            rotate_head(
                at(in, head * size, is_bf16), cos, sin,
                into(q, (row * p->num_q + head) * size, is_bf16), size, p->rotary, is_bf16
            );
        in = at(in, p->num_q * size, is_bf16);
        void *k = into(k_cache, p->write[row] * p->k_stride, is_bf16);
        for (int64_t head = 0; head < p->num_k; head++)
            rotate_head(
                at(in, head * size, is_bf16), cos, sin, into(k, head * size, is_bf16), size,
                p->rotary, is_bf16
            );
        in = at(in, p->num_k * size, is_bf16);
        memcpy(into(v_cache, p->write[row] * p->v_stride, is_bf16), in, v_bytes);
    }
}

void rope_write(
    const RopePlan *p, const void *qkv, void *q, void *k_cache, void *v_cache
) {
    if (p->is_bf16)
        rope_write_typed(p, qkv, q, k_cache, v_cache, 1);
    else
        rope_write_typed(p, qkv, q, k_cache, v_cache, 0);
}

/* ---- attention of few query rows over rows of a paged cache ---- */

void attend_prepare(AttendPlan *p) {
    const int64_t width = padded(p->num_read), blocks = width / WIDTH;
    memset(p->mixed, 0, p->requests * blocks);
    for (int64_t r = 0; r < p->requests; r++) {
        int64_t n = 0;
        float *added = p->added + r * p->queries * width;
        for (int64_t s = 0; s < p->num_read; s++) {
            int64_t seen = 0;
            for (int64_t q = 0; q < p->queries; q++) {
                const int64_t index = (r * p->queries + q) * p->num_read + s;
                float x;
                if (p->is_bf16) {
                    uint32_t u = (uint32_t)((const uint16_t *)p->bias)[index] << 16;
                    memcpy(&x, &u, 4);
                } else {
                    x = ((const float *)p->bias)[index];
                }
                added[q * width + n] = x;
                seen += x != -INFINITY;
            }
            if (!seen) continue;
            if (seen < p->queries) p->mixed[r * blocks + n / WIDTH] = 1;
            p->rows[r * width + n++] = p->read[r * p->num_read + s];
        }
        p->count[r] = n;
        for (int64_t q = 0; q < p->queries; q++)
            for (int64_t s = n; s < padded(n); s++) added[q * width + s] = -INFINITY;
    }
}

/* Scratch rows first_node .. first_node + queries - 1 of each request. */
void tree_write(
    const TreePlan *t, int64_t first_node, int64_t requests, int64_t queries, int64_t *write
) {
    for (int64_t r = 0; r < requests; r++)
        for (int64_t q = 0; q < queries; q++)
            *write++ = t->first_scratch + t->slots[r] * t->num_scratch + first_node + q;
}

/* The same from page tables and a tree's mask. */
void attend_tree(AttendPlan *p, const TreePlan *t) {
    const int64_t width = padded(p->num_read), blocks = width / WIDTH;
    memset(p->mixed, 0, p->requests * blocks);
    for (int64_t r = 0; r < p->requests; r++) {
        const int64_t *table = t->table + r * t->table_stride;
        const unsigned char *visible = t->visible + r * t->visible_r;
        float *added = p->added + r * p->queries * width;
        int64_t n = 0, *rows = p->rows + r * width;
        const int64_t end = t->end[r] < t->last_index ? t->end[r] : t->last_index;
        for (int64_t s = t->first_index; s < end; s++)
            rows[n++] = table[s / t->page_size] * t->page_size + s % t->page_size;
        for (int64_t q = 0; q < p->queries; q++) memset(added + q * width, 0, n * sizeof(float));
        const int64_t scratch = t->first_scratch + t->slots[r] * t->num_scratch;
        for (int64_t node = 0; node < t->nodes; node++) {
            int64_t seen = 0;
            for (int64_t q = 0; q < p->queries; q++) {
                const int sees = visible[q * t->visible_q + node * t->visible_n] != 0;
                added[q * width + n] = sees ? 0 : -INFINITY;
                seen += sees;
            }
            if (!seen) continue; /* such a node may never have been written */
            if (seen < p->queries) p->mixed[r * blocks + n / WIDTH] = 1;
            rows[n++] = scratch + node;
        }
        p->count[r] = n;
        for (int64_t q = 0; q < p->queries; q++)
            for (int64_t s = n; s < padded(n); s++) added[q * width + s] = -INFINITY;
    }
}

/* WIDTH dot products at once: sums over each of 16 vectors, by halving them in pairs. */
#if defined(__clang__) || __GNUC__ >= 12
#define MERGE(a, b, ...) \
    (__builtin_shufflevector(a, b, __VA_ARGS__))
#else
#define MERGE(a, b, ...) (__builtin_shuffle(a, b, (ints){__VA_ARGS__}))
#endif

INLINE vec merge_1(vec a, vec b) {
    return MERGE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           MERGE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

INLINE vec merge_2(vec a, vec b) {
    return MERGE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           MERGE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

INLINE vec merge_4(vec a, vec b) {
    return MERGE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           MERGE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}

INLINE vec merge_8(vec a, vec b) {
    return MERGE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           MERGE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

INLINE vec dot(const float *q, const float *k, int64_t width) {
    vec total = load(q, 0, 0) * load(k, 0, 0);
    for (int64_t i = WIDTH; i < width; i += WIDTH) total += load(q, i, 0) * load(k, i, 0);
    return total;
}

INLINE vec dots_4(const float *q, const float *k, int64_t width) {
    return merge_2(
        merge_1(dot(q, k, width), dot(q, k + width, width)),
        merge_1(dot(q, k + 2 * width, width), dot(q, k + 3 * width, width))
    );
}

INLINE vec dots_16(const float *q, const float *k, int64_t width) {
    vec a = merge_4(dots_4(q, k, width), dots_4(q, k + 4 * width, width));
    vec b = merge_4(dots_4(q, k + 8 * width, width), dots_4(q, k + 12 * width, width));
    return merge_8(a, b);
}

/* Ask for rows that are wanted soon, all heads of them: rows lie scattered, and waiting for each
 * would take most of the time. */
INLINE void expect(const void *cache, const int64_t *rows, int64_t n, int64_t stride, int is_bf16) {
    const int64_t size = stride * (is_bf16 ? 2 : 4);
    for (int64_t j = 0; j < n && j < WIDTH; j++) {
        const char *row = at(cache, rows[j] * stride, is_bf16);
        for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
}

/* WIDTH rows of one head as fp32, each padded with zeros; so are rows past the end. */
INLINE void fetch(
    float *block, const void *cache, const int64_t *rows, int64_t n, int64_t stride, int64_t size,
    const int is_bf16
) {
    const int64_t width = padded(size), whole = size / WIDTH * WIDTH;
    for (int64_t j = 0; j < n; j++) {
        const void *x = at(cache, rows[j] * stride, is_bf16);
        for (int64_t i = 0; i < whole; i += WIDTH)
            store(block + j * width, i, load(x, i, is_bf16), 0);
        if (whole < size)
            store(block + j * width, whole, load_part(x, whole, size - whole, is_bf16), 0);
    }
    if (n < WIDTH) memset(block + n * width, 0, (WIDTH - n) * width * sizeof(float));
}

/* Scores to weights, not yet divided by their sum, whose inverse is returned (0: nothing seen). */
INLINE float soften(float *score, int64_t n) {
    vec most = splat(-INFINITY);
    for (int64_t i = 0; i < n; i += WIDTH) {
        vec x = load(score, i, 0);
        most = pick(x > most, x, most);
    }
    float top = most[0];
    for (int i = 1; i < WIDTH; i++) top = most[i] > top ? most[i] : top;
    vec total = {0};
    for (int64_t i = 0; i < n; i += WIDTH) {
        vec x = load(score, i, 0);
        vec y = pick(x == -INFINITY, (vec){0}, exponential(x - top));
        store(score, i, y, 0);
        total += y;
    }
    const float all = sum(total);
    return all == 0 ? 0 : 1 / all;
}

/* out += weight[0..15] * block; `mixed`: a hidden row counts nothing even where it is NaN. */
INLINE void accumulate(
    float *out, const float *weight, const float *block, int64_t width, int mixed
) {
    for (int64_t i = 0; i < width; i += 4 * WIDTH) {
        const int64_t parts = width - i >= 4 * WIDTH ? 4 : (width - i) / WIDTH;
        if (parts == 4 && !mixed) {
            vec a = load(out, i, 0), b = load(out, i + WIDTH, 0);
            vec c = load(out, i + 2 * WIDTH, 0), d = load(out, i + 3 * WIDTH, 0);
            for (int j = 0; j < WIDTH; j++) {
                const float *row = block + j * width + i;
                a += weight[j] * load(row, 0, 0);
                b += weight[j] * load(row, WIDTH, 0);
                c += weight[j] * load(row, 2 * WIDTH, 0);
                d += weight[j] * load(row, 3 * WIDTH, 0);
            }
            store(out, i, a, 0);
            store(out, i + WIDTH, b, 0);
            store(out, i + 2 * WIDTH, c, 0);
            store(out, i + 3 * WIDTH, d, 0);
            continue;
        }
        for (int64_t part = i; part < i + parts * WIDTH; part += WIDTH) {
            vec a = load(out, part, 0);
            for (int j = 0; j < WIDTH; j++)
                if (weight[j] != 0) a += weight[j] * load(block, j * width + part, 0);
            store(out, part, a, 0);
        }
    }
}

/* scratch: queries * group rows of [padded size] q, [S] scores, [padded v_size] out, inverse sum;
 * then one block of WIDTH rows of keys or values. */
INLINE void attend_typed(
    const AttendPlan *p, const void *q, const void *k, const void *v, void *out, const int64_t size,
    const int64_t v_size, const int is_bf16
) {
    const int64_t group = p->heads / p->kv_heads, rows = p->queries * group;
    const int64_t width = padded(size), v_width = padded(v_size), reach = padded(p->num_read);
    float *q_rows = p->scratch, *scores = q_rows + rows * width, *outs = scores + rows * reach;
    float *inverse = outs + rows * v_width, *block = inverse + padded(rows);
    for (int64_t r = 0; r < p->requests; r++) {
        const int64_t n = p->count[r], *read = p->rows + r * reach;
        const unsigned char *mixed = p->mixed + r * (reach / WIDTH);
        const float *added = p->added + r * p->queries * reach;
        for (int64_t head = 0; head < p->kv_heads; head++) {
            for (int64_t row = 0; row < rows; row++) {
                const int64_t token = r * p->queries + row / group;
                const int64_t at_q = token * p->q_stride + (head * group + row % group) * size;
                for (int64_t i = 0; i < width; i += WIDTH) {
                    vec x = size - i >= WIDTH ? load(q, at_q + i, is_bf16)
                                              : load_part(q, at_q + i, size - i, is_bf16);
                    store(q_rows, row * width + i, x * p->scale, 0);
                }
            }
            const void *k_head = at(k, head * size, is_bf16);
            for (int64_t s = 0; s < n; s += WIDTH) {
                const int64_t here = n - s < WIDTH ? n - s : WIDTH;
                if (head == 0) { /* keys one block ahead; values, needed last, all along */
                    expect(k, read + s + WIDTH, n - s - WIDTH, p->k_stride, is_bf16);
                    expect(v, read + s, n - s, p->v_stride, is_bf16);
                }
                fetch(block, k_head, read + s, here, p->k_stride, size, is_bf16);
                for (int64_t row = 0; row < rows; row++) {
                    vec bias = load(added, row / group * reach + s, 0);
                    vec x = dots_16(q_rows + row * width, block, width) + bias;
                    store(scores, row * reach + s, pick(bias == -INFINITY, bias, x), 0);
                }
            }
            for (int64_t row = 0; row < rows; row++)
                inverse[row] = soften(scores + row * reach, n);
            memset(outs, 0, rows * v_width * sizeof(float));
            const void *v_head = at(v, head * v_size, is_bf16);
            for (int64_t s = 0; s < n; s += WIDTH) {
                const int64_t here = n - s < WIDTH ? n - s : WIDTH;
                fetch(block, v_head, read + s, here, p->v_stride, v_size, is_bf16);
                for (int64_t row = 0; row < rows; row++)
                    accumulate(
                        outs + row * v_width, scores + row * reach + s, block, v_width,
                        mixed[s / WIDTH]
                    );
            }
            for (int64_t row = 0; row < rows; row++) {
                const int64_t token = r * p->queries + row / group;
                const int64_t to = (token * p->heads + head * group + row % group) * v_size;
                for (int64_t i = 0; i < v_size; i += WIDTH) {
                    vec x = load(outs, row * v_width + i, 0) * inverse[row];
                    if (v_size - i >= WIDTH)
                        store(out, to + i, x, is_bf16);
                    else
                        store_part(out, to + i, x, v_size - i, is_bf16);
                }
            }
        }
    }
}

#define FOR_SIZES(is_bf16)                                                                       \
    if (p->size == 64 && p->v_size == 64)                                                        \
        attend_typed(p, q, k, v, out, 64, 64, is_bf16);                                          \
    else if (p->size == 128 && p->v_size == 128)                                                 \
        attend_typed(p, q, k, v, out, 128, 128, is_bf16);                                        \
    else                                                                                         \
        attend_typed(p, q, k, v, out, p->size, p->v_size, is_bf16);

void attend(const AttendPlan *p, const void *q, const void *k, const void *v, void *out) {
    if (p->is_bf16) {
        FOR_SIZES(1)
    } else {
        FOR_SIZES(0)
    }
}

/* ---- first index of the largest element of each row; a NaN is the largest ---- */

INLINE int64_t first_equal(const void *x, int64_t size, float value, const int is_bf16) {
    const int wants_nan = value != value;
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
        vec v = load(x, i, is_bf16);
        ints same = wants_nan ? v != v : v == value;
        int32_t any = 0;
        for (int lane = 0; lane < WIDTH; lane++) any |= same[lane];
        if (any) break;
    }
    for (; i < size; i++) {
        float v = load_part(x, i, 1, is_bf16)[0];
        if (wants_nan ? v != v : v == value) break;
    }
    return i;
}

INLINE void argmax(const void *x, int64_t *out, int64_t rows, int64_t size, const int is_bf16) {
    const int64_t whole = size / WIDTH * WIDTH;
    for (int64_t row = 0; row < rows; row++) {
        const void *in = at(x, row * size, is_bf16);
        vec most = splat(-INFINITY);
        ints nan = {0};
        for (int64_t i = 0; i < whole; i += WIDTH) {
            vec v = load(in, i, is_bf16);
            most = pick(v > most, v, most);
            nan |= v != v;
        }
        float top = -INFINITY;
        for (int lane = 0; lane < WIDTH; lane++) {
            top = most[lane] > top ? most[lane] : top;
            if (nan[lane]) most[lane] = NAN;
        }
        for (int lane = 0; lane < WIDTH; lane++)
            if (most[lane] != most[lane]) top = NAN;
        for (int64_t i = whole; i < size; i++) {
            float v = load_part(in, i, 1, is_bf16)[0];
            if (v > top || v != v) top = v;
        }
        out[row] = first_equal(in, size, top, is_bf16);
    }
}

void argmax_f32(const void *x, int64_t *out, int64_t rows, int64_t size) {
    argmax(x, out, rows, size, 0);
}

void argmax_bf16(const void *x, int64_t *out, int64_t rows, int64_t size) {
    argmax(x, out, rows, size, 1);
}
