// Shared by the kernels of layers with a recurrence: the states of a step's sequences, the convolution at the entry of
// a layer, and the matrix of a head as the threads of a block hold it.
//
// A state is a row of `memory`: the inputs of the last `num_taps - 1` positions, [position][channels], the oldest
// first; then, in layers with heads, a matrix for each head. Whatever the chunks of a sequence are, its rows get the
// same operations on the same values: a convolution sums from the oldest position to the newest, and a matrix advances
// row by row.

struct States {
    // For each sequence five words: its first row, the end of its rows, the slot of its state (NO_SLOT for zeros), and
    // the first and the number of its saves. The first is an offset in words from `spans`; a save is a row, counted
    // from the sequence's first, and a slot.
    const u32* spans;
    float* memory;  // [slots][state_len]
    u64 state_len;
    u32 num_sequences;
};

static const u32 NO_SLOT = 0xffffffffu;
static const u32 SPAN_WORDS = 5;

struct Sequence {
    u32 first_row, num_rows;
    const float* from;  // null for zeros
    const u32* saves;
    u32 num_saves;
};

DEVICE Sequence sequence_of(const States& states, u32 i) {
    const u32* span = states.spans + i * SPAN_WORDS;
    Sequence s;
    s.first_row = span[0];
    s.num_rows = span[1] - span[0];
    s.from = span[2] == NO_SLOT ? 0 : states.memory + span[2] * states.state_len;
    s.saves = states.spans + span[3];
    s.num_saves = span[4];
    return s;
}

// Rows that a thread of a convolution computes. No fewer than MAX_TAPS, so that only the first run of a sequence reads
// the state; as many as a short chunk has (MAX_SHORT_CHUNK of step.rs), so that a recorded step has one run.
static const u32 CONVOLVED_RUN = 16;
static const u32 MAX_TAPS = 8;

// The convolution of one channel at row t of a sequence: first + taps[0] x[t - num_taps + 1] + ... + taps[last] x[t].
// `input(t)` is the input at row t.
template <class Input>
DEVICE float convolved(const Sequence& s, const float* taps, u32 num_taps, u32 channels, u32 channel, u32 t,
    float first, Input input) {
    float sum = first;
#pragma unroll 4
    for (u32 i = 0; i < num_taps; i++) {
        u32 at = t + i + 1;  // num_taps more than the row
        float x = 0.0f;
        if (at >= num_taps)
            x = input(at - num_taps);
        else if (s.from)
            x = s.from[(u64)(at - 1) * channels + channel];
        sum = __fmaf_rn(taps[i * channels + channel], x, sum);
    }
    return sum;
}

// Saves the inputs of a channel at the last positions, for every save of a sequence. Only the thread that has read the
// channel's state may do it: a save may overwrite the state that the sequence started from.
template <class Input>
DEVICE void save_inputs(const States& states, const Sequence& s, u32 num_taps, u32 channels, u32 channel, Input input) {
    float old[MAX_TAPS - 1];
#pragma unroll
    for (u32 i = 0; i < MAX_TAPS - 1; i++)
        old[i] = s.from && i + 1 < num_taps ? s.from[(u64)i * channels + channel] : 0.0f;
#pragma unroll 1
    for (u32 n = 0; n < s.num_saves; n++) {
        u32 row = s.saves[2 * n];
        float* to = states.memory + s.saves[2 * n + 1] * states.state_len + channel;
#pragma unroll
        for (u32 i = 0; i < MAX_TAPS - 1; i++) {
            if (i + 1 >= num_taps) continue;
            u32 at = row + 2 + i;  // num_taps more than the row of this input
            float x = 0.0f;
            if (at >= num_taps) x = input(at - num_taps);
#pragma unroll
            for (u32 k = 0; k < MAX_TAPS - 1; k++)
                if (at < num_taps && k == at - 1) x = old[k];
            to[(u64)i * channels] = x;
        }
    }
}

DEVICE float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, expf(-x))); }

// ln(1 + e^x); x itself above 20, where the difference is under 2.1e-9.
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The matrix of a head, [keys][columns], is distributed over blocks of 128 threads by columns: each takes 32. A warp
// has eight columns, and each of them four lanes; lane group g has the rows 16 i + 4 g to 16 i + 4 g + 3. Sums over
// rows stay within a column: four in each lane by the row's number modulo 4, each in ascending order, then over the
// four lanes.
static const u32 COLUMNS = 32;
static const u32 MATRIX_THREADS = 128;

// The inputs of one row for a block: two vectors with a value for each row of the matrix, one value for each column,
// and four factors of the head.
template <int QUADS>
struct __align__(16) Token {
    float rows[2][QUADS * 16];
    float columns[COLUMNS];
    float factors[4];
};

// Copies four bytes from global to shared memory asynchronously; zeros if `valid` is false.
DEVICE void copy_word_async(u32 to, const void* from, bool valid) {
    int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Addresses of the inputs of rows, for one head.
struct TokenSource {
    const float* rows[2];   // of the step's first row
    const float* columns;
    const float* factors;   // [step's rows][heads][4], of this head
    u32 pitch;              // values from a row of `rows` and `columns` to the next
    u32 factors_pitch;
    u32 num_keys, num_columns;
};

// Starts to copy `count` rows from `first` on. Each warp copies whole rows.
template <int QUADS>
DEVICE void fetch_tokens(Token<QUADS>* to, const TokenSource& source, u32 first, u32 count) {
    u32 lane = threadIdx.x % 32;
    for (u32 i = threadIdx.x / 32; i < count; i += MATRIX_THREADS / 32) {
        u64 row = first + i;
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (u32 k = 0; k < QUADS * 16; k += 32) {
                u32 key = k + lane;
                bool valid = key < source.num_keys;
                if (QUADS % 2 == 0 || key < QUADS * 16)
                    copy_word_async(shared_address(&to[i].rows[part][key]),
                        source.rows[part] + row * source.pitch + (valid ? key : 0), valid);
            }
        bool valid = lane < source.num_columns;
        copy_word_async(shared_address(&to[i].columns[lane]), source.columns + row * source.pitch + (valid ? lane : 0),
            valid);
        if (lane == 0) copy_async(shared_address(to[i].factors), source.factors + row * source.factors_pitch, true);
    }
}

// Calls `advance(token, row)` for every row of a sequence, in order, and `save(slot)` after the rows whose state is
// saved. Rows are fetched a stage ahead.
template <int QUADS, class Advance, class Save>
DEVICE void for_each_token(const Sequence& s, const TokenSource& source, Advance advance, Save save) {
    static const u32 TOKENS = QUADS > 8 ? 8 : 16;
    __shared__ Token<QUADS> stages[2][TOKENS];
    u32 next_save = 0;
    fetch_tokens(stages[0], source, s.first_row, min(TOKENS, s.num_rows));
    copy_async_commit();
    for (u32 start = 0, stage = 0; start < s.num_rows; start += TOKENS, stage ^= 1) {
        u32 after = start + TOKENS;
        if (after < s.num_rows) fetch_tokens(stages[stage ^ 1], source, s.first_row + after, min(TOKENS, s.num_rows -
            after));
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        u32 count = min(TOKENS, s.num_rows - start);
        for (u32 i = 0; i < count; i++) {
            advance(stages[stage][i], s.first_row + start + i);
            while (next_save < s.num_saves && s.saves[2 * next_save] == start + i) {
                save(s.saves[2 * next_save + 1]);
                next_save++;
            }
        }
        __syncthreads();
    }
}

// The row of the matrix of a thread's cell.
DEVICE u32 cell_row(u32 quad, u32 i) { return quad * 16 + threadIdx.x % 32 / 8 * 4 + i; }

// Loads the cells of a thread from a matrix; zeros if there is none. This may come before the wait for the kernel
// before (the convolution, which writes no matrix): a step writes the states of a layer once, and the tables of a step
// are copied to the device after everything before it is done.
template <int QUADS>
DEVICE void load_cells(float (&cells)[QUADS][4], const float* matrix, u32 num_keys, u32 width, u32 column) {
    bool valid = matrix && column < width;
    const float* from = matrix + cell_row(0, 0) * width + column;
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++, from += 16 * width)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            cells[quad][i] = valid && cell_row(quad, i) < num_keys ? from[i * width] : 0.0f;
}

template <int QUADS>
DEVICE void store_cells(const float (&cells)[QUADS][4], float* matrix, u32 num_keys, u32 width, u32 column) {
    float* to = matrix + cell_row(0, 0) * width + column;
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++, to += 16 * width)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (column < width && cell_row(quad, i) < num_keys) to[i * width] = cells[quad][i];
}

// The sum over the rows of a column, from the four sums of each of its lanes.
DEVICE float column_sum(const float (&sums)[4]) {
    float sum = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
    sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, 8));
    return __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, 16));
}

// Column of a thread.
DEVICE u32 column_of_thread() { return blockIdx.x * COLUMNS + threadIdx.x / 32 * 8 + threadIdx.x % 8; }
