/* What happens in a round between the models' forwards, for greedy requests on a CPU: a call a step.
 *
 * The rules are those of `reference.walk_tree` and `reference.cut_emitted`. See native_round.py.
 * Counts and strides are in elements, those of rows that are only copied in bytes.
 */

#include "native.h"

/* ---- the slots, as speculative.state has them ---- */

typedef struct {
    int64_t *length, *pending, *remaining, *emitted;
    unsigned char *active;
    const int64_t *max_draft, *stop_ids, *page_table;
    int64_t num_stops, num_pages;
} Slots;

typedef struct {
    int64_t page_size, trash_row, trash_page, first_scratch, num_scratch;
} Places;

/* By request: length, end of what the draft sees, page table, positions of `nodes` chain nodes. */
void round_begin(
    const Slots *s, const int64_t *slots, int64_t requests, int64_t nodes, int64_t *length,
    int64_t *draft_end, int64_t *table, int64_t *position, int64_t *draft_position
) {
    for (int64_t r = 0; r < requests; r++) {
        const int64_t slot = slots[r], at = s->length[slot];
        length[r] = at;
        draft_end[r] = at + 1;
        memcpy(table + r * s->num_pages, s->page_table + slot * s->num_pages, 8 * s->num_pages);
        for (int64_t n = 0; n < nodes; n++) position[r * nodes + n] = at + n;
        /* Level l (from 1) of the draft stands at length + l - 1. */
        for (int64_t l = 0; l + 2 < nodes; l++) draft_position[l * requests + r] = at + l;
    }
}

/* Parents, depths and masks of chains. */
void chain_shape(
    int64_t requests, int64_t nodes, int64_t *parent, int64_t *depth, unsigned char *visible
) {
    for (int64_t r = 0; r < requests; r++)
        for (int64_t n = 0; n < nodes; n++) {
            *parent++ = n - 1;
            *depth++ = n;
            for (int64_t other = 0; other < nodes; other++) *visible++ = other <= n;
        }
}

/* The first two columns of chains, and the hidden states that the second comes from. */
void chain_begin(
    const Slots *s, const int64_t *slots, int64_t requests, int64_t nodes,
    const int64_t *candidate, int64_t topk, const char *hidden, int64_t row_bytes, int64_t *token,
    int64_t *next, char *out
) {
    for (int64_t r = 0; r < requests; r++) {
        const int64_t slot = slots[r];
        token[r * nodes] = s->pending[slot];
        if (nodes < 2) continue;
        token[r * nodes + 1] = next[r] = candidate[slot * topk];
        memcpy(out + r * row_bytes, hidden + slot * row_bytes, row_bytes);
    }
}

void argmax_f32(const void *x, int64_t *out, int64_t rows, int64_t size);
void argmax_bf16(const void *x, int64_t *out, int64_t rows, int64_t size);

/* next = the target's id of each row's best logit; also into a column of the chains. */
void chain_advance(
    const void *logits, int64_t is_bf16, int64_t requests, int64_t vocab, const int64_t *target_id,
    int64_t *next, int64_t *token, int64_t nodes, int64_t column
) {
    if (is_bf16)
        argmax_bf16(logits, next, requests, vocab);
    else
        argmax_f32(logits, next, requests, vocab);
    for (int64_t r = 0; r < requests; r++) {
        next[r] = target_id[next[r]];
        if (token) token[r * nodes + column] = next[r];
    }
}

/* The slots' first candidates, of score 0, and the hidden states that they come from. */
void first_level(
    const void *logits, int64_t is_bf16, int64_t requests, int64_t vocab, const int64_t *target_id,
    const int64_t *slots, const char *hidden, int64_t row_bytes, int64_t *candidate, float *score,
    char *kept, int64_t *work
) {
    chain_advance(logits, is_bf16, requests, vocab, target_id, work, 0, 0, 0);
    for (int64_t r = 0; r < requests; r++) {
        candidate[slots[r]] = work[r];
        score[slots[r]] = 0;
        memcpy(kept + slots[r] * row_bytes, hidden + r * row_bytes, row_bytes);
    }
}

/* ---- acceptance, emission, and where the slots stand after it ---- */

typedef struct {
    int64_t *packed;                                       /* [requests, steps + 3] */
    int64_t *emitted, *row, *source, *destination;         /* [requests, steps] */
    int64_t *position, *entry_row, *page;                  /* of the draft's entries */
    int64_t *last, *moved, *pending, *length, *last_position; /* [requests] */
} Outcome;

INLINE int is_stop(const int64_t *stops, int64_t n, int64_t token) {
    for (int64_t i = 0; i < n; i++)
        if (stops[i] == token) return 1;
    return 0;
}

void round_settle(
    const Slots *s, const Places *p, const int64_t *slots, int64_t requests, int64_t nodes,
    int64_t steps, const int64_t *token, const int64_t *parent, const int64_t *chosen, Outcome *o
) {
    for (int64_t r = 0; r < requests; r++) {
        const int64_t slot = slots[r], length = s->length[slot], first = r * steps;
        const int64_t *table = s->page_table + slot * s->num_pages;
        const int64_t *stops = s->stop_ids + slot * s->num_stops;
        const int64_t *choice = chosen + r * nodes;
        int64_t path[64], at = 0, accepted = 0, walking = 1;
        path[0] = 0;
        for (int64_t step = 1; step < steps; step++) {
            int64_t child = nodes;
            if (walking)
                for (child = 0; child < nodes; child++)
                    if (parent[r * nodes + child] == at && token[r * nodes + child] == choice[at])
                        break;
            walking = child < nodes;
            if (walking) at = child, accepted++;
            path[step] = at;
        }
        if (accepted > s->max_draft[slot]) accepted = s->max_draft[slot];

        const int64_t remaining = s->remaining[slot];
        int64_t num = accepted + 1 < remaining ? accepted + 1 : remaining, finish = 0;
        int64_t stop = 0;
        while (stop < num && !is_stop(stops, s->num_stops, choice[path[stop]])) stop++;
        if (stop < num)
            num = stop + 1, finish = 1;
        else if (num >= remaining)
            finish = 2;
        if (!s->active[slot]) num = finish = 0;

        const int64_t scratch = p->first_scratch + slot * p->num_scratch;
        for (int64_t step = 0; step < steps; step++) {
            const int64_t i = first + step, valid = step < num, index = length + step;
            o->emitted[i] = o->packed[r * (steps + 3) + step] = choice[path[step]];
            o->row[i] = r * nodes + path[step];
            o->source[i] = scratch + path[step];
            o->position[i] = index;
            o->destination[i] = o->entry_row[i] = p->trash_row;
            o->page[i] = p->trash_page;
            if (!valid) continue;
            const int64_t size = p->page_size, after = index + 1;
            o->destination[i] = table[index / size] * size + index % size;
            o->entry_row[i] = table[after / size] * size + after % size;
            if (after % size == 0) o->page[i] = table[index / size];
        }
        int64_t *end = o->packed + r * (steps + 3) + steps;
        end[0] = num, end[1] = finish, end[2] = accepted;

        s->remaining[slot] = remaining - num;
        s->emitted[slot] += num;
        s->length[slot] = length + num;
        s->active[slot] = s->active[slot] && !finish;
        if (num) s->pending[slot] = o->emitted[first + num - 1];
        o->last[r] = first + (num ? num - 1 : 0);
        o->moved[r] = num;
        o->pending[r] = s->pending[slot];
        o->length[r] = length + num;
        o->last_position[r] = length + num > 0 ? length + num - 1 : 0;
    }
}

/* ---- rows that are copied ---- */

/* row[destination] = row[source] in all layers of a pool; what goes to the trash stays away. */
void copy_rows(
    char *pool, int64_t layers, int64_t layer_bytes, int64_t row_bytes, const int64_t *source,
    const int64_t *destination, int64_t count, int64_t trash_row
) {
    for (int64_t layer = 0; layer < layers; layer++, pool += layer_bytes)
        for (int64_t i = 0; i < count; i++)
            if (destination[i] != trash_row)
                memcpy(pool + destination[i] * row_bytes, pool + source[i] * row_bytes, row_bytes);
}

/* s of what ends a page, and of each slot's last row; out: the slots' s. */
void keep_hidden(
    const char *hidden, int64_t row_bytes, int64_t rows, const int64_t *page, char *page_end,
    const int64_t *slots, const int64_t *last, const int64_t *moved, int64_t requests, char *kept,
    char *out
) {
    for (int64_t i = 0; i < rows; i++)
        memcpy(page_end + page[i] * row_bytes, hidden + i * row_bytes, row_bytes);
    for (int64_t r = 0; r < requests; r++) {
        char *slot = kept + slots[r] * row_bytes;
        if (moved[r]) memcpy(slot, hidden + last[r] * row_bytes, row_bytes);
        memcpy(out + r * row_bytes, slot, row_bytes);
    }
}
