// Digests of rows of logits, [rows][vocab_size] in f32: the most probable tokens, the sums of weights, and the tokens
// that may win the draw, so that a row need not be copied to the host. Everything equals to the bit what the sampler
// computes from the row, except the times of the draw: they are close enough to find the few tokens that may win, whose
// exact times the sampler computes.
//
// Bytes moved: the logits three times, mostly from the L2 cache. Bound: latency.

static const u32 BLOCK = 64;          // logits whose weights are summed in f32; blocks are added up as integers
static const u32 LANES = 16;          // threads that sum a block: the order of a sum depends on it
static const u32 NUM_TOP = 256;
static const u32 MAX_FINALISTS = 16;
static const u32 MAX_GATHERED = 4096;
static const u32 MAX_PARTS_ABOVE = 2 * NUM_TOP;
static const float RACE_MARGIN = 1e-4f;
#define UNITS 1099511627776.0  // units of sums of weights, for the weight of the most probable token

struct DigestQuery {
    float inverse;  // 1 / temperature
    u32 races;
    u32 seed_low, seed_high, position;
    // If the whole row does not race, the tokens that do: the k highest, of those a share of p, of those the ones with
    // min_p of the highest weight. k = 0: not known beforehand.
    u32 k;
    float p, min_p;
};

struct RowSummary {
    double totals[2];
    u32 is_plain, has_all, num_top, num_finalists;
    u32 assumed;  // the token that is assumed to be sampled, or NO_TOKEN
    u32 unused;
    u32 top_ids[NUM_TOP];
    float top_logits[NUM_TOP];
    u32 finalist_ids[MAX_FINALISTS];
    float finalist_logits[MAX_FINALISTS];
};

struct DigestRows {
    const float* logits;
    const DigestQuery* queries;
    float* maxima;  // [rows][num_parts]
    float2* sums;   // [rows][num_blocks]: of weights at temperature 1 and at the query's
    float* times;   // [rows][num_blocks]: the fastest
    RowSummary* out;
    u32* assumed;   // [rows]: the token that the next step continues with
    u32 vocab_size;
    u32 num_blocks;
    u32 part_len;  // logits of a part whose largest is noted: 16 or 64
    u32 num_parts;
};

#define INFINITE __int_as_float(0x7f800000)

static const u32 NO_TOKEN = 0xffffffffu;

// Sets the token that the next step assumes for the row. If there is none, it continues with token 0, and its results
// are discarded.
DEVICE void assume(const DigestRows& d, u32 row, u32 token) {
    d.out[row].assumed = token;
    d.assumed[row] = token == NO_TOKEN ? 0 : token;
}

// e^x for x at most 0: the sampler's own, operation by operation.
DEVICE float exp_of_nonpositive(float x) {
    const float least = -87.0f, round = 12582912.0f;
    float clamped = x > least ? x : least;
    float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504088896340736f), round);
    float n = __fsub_rn(shifted, round);
    float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float sum = 1.3926182e-3f;
    sum = __fadd_rn(__fmul_rn(sum, r), 8.363178e-3f);
    sum = __fadd_rn(__fmul_rn(sum, r), 4.1666555e-2f);
    sum = __fadd_rn(__fmul_rn(sum, r), 1.6666577e-1f);
    sum = __fadd_rn(__fmul_rn(sum, r), 0.5f);
    float power = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(sum, r), r), r), 1.0f);
    float scaled = __uint_as_float(__float_as_uint(power) + (__float_as_uint(shifted) << 23));
    return x >= least ? scaled : 0.0f;
}

// The first word of Philox4x32-10.
DEVICE u32 token_word(const DigestQuery& query, u32 token) {
    u32 key0 = query.seed_low, key1 = query.seed_high;
    u32 w0 = query.position, w1 = token, w2 = 0, w3 = 0;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        u32 low = 0xD2511F53u * w0, low_high = __umulhi(0xD2511F53u, w0);
        u32 high = 0xCD9E8D57u * w2, high_high = __umulhi(0xCD9E8D57u, w2);
        w0 = high_high ^ w1 ^ key0;
        w1 = high;
        w2 = low_high ^ w3 ^ key1;
        w3 = low;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return w0;
}

// ln(-ln u) + h, with an error below a hundredth of the margin.
DEVICE float race_time(const DigestQuery& query, u32 token, float handicap) {
    u32 number = token_word(query, token) >> 8;
    const float step = 5.9604645e-8f;
    float negative_log = number < (1u << 23) ? -logf(((float)number + 0.5f) * step)
                                             : -log1pf(((float)number - 16777216.0f + 0.5f) * step);
    return logf(negative_log) + handicap;
}

DEVICE float logit_at(const DigestRows& d, u32 row, u32 token) {
    return token < d.vocab_size ? __ldcg(d.logits + (u64)row * d.vocab_size + token) : -INFINITE;
}

// Over the 16 threads that share a block of logits.
DEVICE float sixteen_max(float x) {
    for (int i = 8; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, i));
    return x;
}

DEVICE float sixteen_sum(float x) {
    for (int i = 8; i > 0; i /= 2) x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, i));
    return x;
}

// The largest logit of each part; infinity if the part has a NaN, so that the row is not taken for a plain one.
// A block of threads takes `blockDim.x / 16` blocks of logits at a time.
KERNEL void digest_maxima(DigestRows d) {
    begin();
    u32 row = blockIdx.y, lane = threadIdx.x % LANES;
    u32 stride = gridDim.x * (blockDim.x / LANES);
    // Whole warps loop together: their threads exchange values.
    for (u32 first = blockIdx.x * (blockDim.x / LANES); first < d.num_blocks; first += stride) {
        u32 block = first + threadIdx.x / LANES;
        float largest = -INFINITE;
        for (u32 i = 0; i < BLOCK / LANES; i++) {
            float logit = logit_at(d, row, block * BLOCK + i * LANES + lane);
            logit = logit == logit ? logit : INFINITE;
            if (d.part_len == LANES) {
                float part = sixteen_max(logit);
                u32 number = block * (BLOCK / LANES) + i;
                if (lane == 0 && number < d.num_parts) d.maxima[(u64)row * d.num_parts + number] = part;
            }
            largest = fmaxf(largest, logit);
        }
        largest = sixteen_max(largest);
        if (d.part_len == BLOCK && lane == 0 && block < d.num_blocks)
            d.maxima[(u64)row * d.num_parts + block] = largest;
    }
}

// The largest of the row, for every thread.
DEVICE float row_largest(const DigestRows& d, u32 row) {
    __shared__ float parts[32];
    float largest = -INFINITE;
    for (u32 i = threadIdx.x; i < d.num_parts; i += blockDim.x) largest = fmaxf(largest,
        __ldcg(d.maxima + (u64)row * d.num_parts + i));
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : -INFINITE;
    return warp_max(largest);
}

KERNEL void digest_weights(DigestRows d) {
    wait_for_previous();
    // Blocks that need only the maxima may start now: see `digest_select`.
    let_next_start();
    u32 row = blockIdx.y, lane = threadIdx.x % LANES;
    float largest = row_largest(d, row);
    if (!(fabsf(largest) < INFINITE)) return;
    DigestQuery query = d.queries[row];
    u32 stride = gridDim.x * (blockDim.x / LANES);
    for (u32 first = blockIdx.x * (blockDim.x / LANES); first < d.num_blocks; first += stride) {
        u32 block = first + threadIdx.x / LANES;
        float plain = 0.0f, heated = 0.0f, fastest = INFINITE;
        for (u32 i = 0; i < BLOCK / LANES; i++) {
            u32 token = block * BLOCK + i * LANES + lane;
            float logit = logit_at(d, row, token);
            float below = __fsub_rn(logit, largest);
            plain = __fadd_rn(plain, exp_of_nonpositive(below));
            float scaled = __fmul_rn(below, query.inverse);
            heated = __fadd_rn(heated, exp_of_nonpositive(scaled));
            if (query.races) fastest = fminf(fastest, race_time(query, token, -scaled));
        }
        plain = sixteen_sum(plain);
        heated = sixteen_sum(heated);
        fastest = -sixteen_max(-fastest);
        if (lane == 0 && block < d.num_blocks) {
            d.sums[(u64)row * d.num_blocks + block] = make_float2(plain, heated);
            d.times[(u64)row * d.num_blocks + block] = fastest;
        }
    }
}

// Keys that the block sorts.
extern __shared__ u64 keys[];

// Keys that a warp sorts in its registers.
static const u32 CHUNK = 64;

// One of two keys `distance` apart; runs of `size` alternately descend and ascend.
DEVICE u64 exchanged(u64 key, u32 place, u32 distance, u32 size) {
    u64 other = __shfl_xor_sync(FULL_WARP, key, distance);
    bool takes_larger = ((place & distance) == 0) == ((place & size) == 0);
    return (key > other) == takes_larger ? key : other;
}

// Exchanges over distances below CHUNK, for runs of `first_size` to `last_size`. The code of a kernel that runs once a
// step is in no cache, so short code matters more than few instructions: this is not inlined, and its loops are not
// unrolled.
static __device__ __noinline__ void exchange_near(u32 len, u32 first_size, u32 last_size) {
#pragma unroll 1
    for (u32 begin = threadIdx.x / 32 * CHUNK; begin < len; begin += blockDim.x / 32 * CHUNK) {
        u32 place = begin + threadIdx.x % 32;
        u64 low = keys[place], high = keys[place + 32];
#pragma unroll 1
        for (u32 size = first_size; size <= last_size; size *= 2) {
            if (size >= CHUNK && (place & size ? low > high : low < high)) {
                u64 larger = high;
                high = low;
                low = larger;
            }
#pragma unroll 1
            for (u32 distance = min(size / 2, 16); distance > 0; distance /= 2) {
                low = exchanged(low, place, distance, size);
                high = exchanged(high, place + 32, distance, size);
            }
        }
        keys[place] = low;
        keys[place + 32] = high;
    }
}

// Sorts keys from the largest down, a power of two of them and at least CHUNK; the whole block takes part.
static __device__ __noinline__ void sort_descending(u32 len) {
    __syncthreads();
#pragma unroll 1
    for (u32 size = CHUNK; size <= len; size *= 2) {
#pragma unroll 1
        for (u32 distance = size / 2; distance >= CHUNK; distance /= 2) {
#pragma unroll 1
            for (u32 i = threadIdx.x; i < len / 2; i += blockDim.x) {
                u32 low = 2 * i - (i & (distance - 1)), high = low + distance;
                u64 a = keys[low], b = keys[high];
                if (low & size ? a > b : a < b) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            __syncthreads();
        }
        exchange_near(len, size == CHUNK ? 2 : size, size);
        __syncthreads();
    }
}

// Number of slots that sorting n keys takes.
DEVICE u32 sorted_len(u32 n) { return n <= CHUNK ? CHUNK : 1u << (32 - __clz(n - 1)); }

// A key by which the fastest of several is found: the least.
DEVICE u64 finish_key(float time, u32 token) { return (u64)ordered(time) << 32 | token; }

// The sum of all weights at the query's temperature, close enough for an assumption; the whole block takes part.
DEVICE float heated_total(const DigestRows& d, u32 row) {
    __shared__ float parts[32];
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < d.num_blocks; i += blockDim.x) sum += d.sums[(u64)row * d.num_blocks + i].y;
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, i);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f;
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, i);
    return sum;
}

// The token with the earliest time among the most probable ones that the query admits. `keys` are those of the
// `num_top` highest, from the highest down, one for each of the first threads; the whole block takes part.
DEVICE void assume_of_top(const DigestRows& d, u32 row, u32 num_top, bool has_all) {
    __shared__ float warp_sums[32];
    __shared__ u64 first;
    u32 thread = threadIdx.x, lane = thread % 32;
    DigestQuery query = d.queries[row];
    if (query.k == 0) {
        if (thread == 0) assume(d, row, NO_TOKEN);
        return;
    }
    u32 num_highest = min(num_top, query.k);
    bool is_highest = thread < num_highest;
    float largest = unordered((u32)(keys[0] >> 32));
    u64 key = is_highest ? keys[thread] : 0;
    float scaled = is_highest ? __fmul_rn(__fsub_rn(unordered((u32)(key >> 32)), largest), query.inverse) : 0.0f;
    float weight = is_highest ? exp_of_nonpositive(scaled) : 0.0f;
    // The sum up to each of them, itself included.
    float sum = weight;
    for (u32 i = 1; i < 32; i *= 2) {
        float below = __shfl_up_sync(FULL_WARP, sum, i);
        if (lane >= i) sum += below;
    }
    if (lane == 31) warp_sums[thread / 32] = sum;
    if (thread == 0) first = ~0ull;
    __syncthreads();
    float total = 0.0f;
#pragma unroll 1
    for (u32 i = 0; i < blockDim.x / 32; i++) {
        if (i == thread / 32) sum += total;
        total += warp_sums[i];
    }
    if (num_highest < query.k && !has_all) total = heated_total(d, row);
    bool is_in_share = query.p >= 1.0f || sum - weight < query.p * total;
    if (is_highest && (thread == 0 || (is_in_share && weight >= query.min_p))) {
        u32 token = ~(u32)key;
        atomicMin(&first, finish_key(race_time(query, token, -scaled), token));
    }
    __syncthreads();
    if (thread == 0) assume(d, row, (u32)first);
}

// The value that `before` others are at or above, in the order of `ordered`: found bit by bit from the highest, by
// counting the values that reach it. Some warps do it, because it needs 32 barriers; the whole block takes part in the
// end.
DEVICE u32 largest_but(const float* numbers, u32 len, u32 before) {
    static const u32 THREADS = 256, WARPS = THREADS / 32, MOST_HELD = 32;
    __shared__ u32 counts[2][WARPS], result;
    u32 found = 0, each = (len + THREADS - 1) / THREADS;
    if (threadIdx.x < THREADS) {
        u32 held[MOST_HELD];
#pragma unroll
        for (u32 k = 0; k < MOST_HELD; k++) {
            if (k >= each) break;
            u32 i = threadIdx.x + k * THREADS;
            held[k] = i < len ? ordered(__ldcg(numbers + i)) : 0;
        }
#pragma unroll 1
        for (u32 bit = 32; bit-- > 0;) {
            u32 least = found | 1u << bit, count = 0;
#pragma unroll
            for (u32 k = 0; k < MOST_HELD; k++) {
                if (k >= each) break;
                count += held[k] >= least;
            }
            count = __reduce_add_sync(FULL_WARP, count);
            u32* here = counts[bit % 2];
            if (threadIdx.x % 32 == 0) here[threadIdx.x / 32] = count;
            asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
            u32 total = 0;
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) total += here[w];
            if (total > before) found = least;
        }
        if (threadIdx.x == 0) result = found;
    }
    __syncthreads();
    return result;
}

// The most probable tokens of a row.
DEVICE void select_top(const DigestRows& d, u32 row) {
    __shared__ u32 num_gathered, num_parts_above;
    __shared__ u16 parts_above[MAX_PARTS_ABOVE];
    u32 thread = threadIdx.x;
    RowSummary& out = d.out[row];
    const float* maxima = d.maxima + (u64)row * d.num_parts;

    // Of NUM_TOP parts, each has a logit at or above the NUM_TOP-th largest of the parts' maxima: a logit below it is
    // not on top.
    if (thread == 0) num_gathered = num_parts_above = 0;
    float largest = row_largest(d, row);
    float cut = d.num_parts < NUM_TOP ? -INFINITE : unordered(largest_but(maxima, d.num_parts, NUM_TOP - 1));
    bool is_plain = fabsf(largest) < INFINITE;
    for (u32 part = thread; part < d.num_parts && is_plain; part += blockDim.x) {
        float part_largest = __ldcg(maxima + part);
        if (part_largest < cut || part_largest == -INFINITE) continue;
        u32 place = atomicAdd(&num_parts_above, 1);
        if (place < MAX_PARTS_ABOVE) parts_above[place] = part;
    }
    __syncthreads();
    // More than NUM_TOP parts reach the cut only if several have it as their largest; with many such ties the whole row
    // is searched.
    is_plain = is_plain && num_parts_above <= MAX_PARTS_ABOVE;

    // All loads are issued before the first use.
    static const u32 TOGETHER = 8;
    u32 part_log = logarithm(d.part_len), num_above = is_plain ? num_parts_above << part_log : 0;
#pragma unroll 1
    for (u32 base = thread; base < num_above; base += TOGETHER * blockDim.x) {
        u32 token[TOGETHER];
        float logit[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; k++) {
            u32 i = base + k * blockDim.x;
            token[k] = i < num_above ? (parts_above[i >> part_log] << part_log) + (i & (d.part_len - 1)) : d.vocab_size;
            logit[k] = logit_at(d, row, token[k]);
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; k++)
            if (logit[k] >= cut && logit[k] > -INFINITE) {
                u32 place = atomicAdd(&num_gathered, 1);
                if (place < MAX_GATHERED) keys[place] = (u64)ordered(logit[k]) << 32 | ~token[k];
            }
    }
    __syncthreads();
    u32 gathered = num_gathered;
    is_plain = is_plain && gathered <= MAX_GATHERED;
    if (thread == 0) out.is_plain = is_plain;
    // If the whole row races, `find_finalists` finds the first.
    bool assumes = !d.queries[row].races;
    if (!is_plain) {
        if (thread == 0 && assumes) assume(d, row, NO_TOKEN);
        return;
    }
    u32 len = sorted_len(gathered);
    for (u32 i = gathered + thread; i < len; i += blockDim.x) keys[i] = 0;
    sort_descending(len);
    u32 num_top = min(gathered, NUM_TOP);
    for (u32 i = thread; i < num_top; i += blockDim.x) {
        u32 token = ~(u32)keys[i];
        out.top_ids[i] = token;
        out.top_logits[i] = logit_at(d, row, token);
    }
    bool has_all = cut == -INFINITE && gathered <= NUM_TOP;
    if (thread == 0) {
        out.num_top = num_top;
        out.has_all = has_all;
    }
    if (!assumes) return;
    // Until here nothing was read that `digest_weights` writes.
    wait_for_previous();
    assume_of_top(d, row, num_top, has_all);
}

// A weight in the sampler's units, rounded as it rounds.
DEVICE u64 units(float weight) { return __double2ull_rz(__dadd_rn(__dmul_rn((double)weight, UNITS), 0.5)); }

// The sums of the blocks, in units: integers, whose order does not matter.
DEVICE void add_sums(const DigestRows& d, u32 row) {
    __shared__ u64 totals[2];
    if (threadIdx.x < 2) totals[threadIdx.x] = 0;
    __syncthreads();
    u64 plain = 0, heated = 0;
    for (u32 i = threadIdx.x; i < d.num_blocks; i += blockDim.x) {
        float2 sums = d.sums[(u64)row * d.num_blocks + i];
        plain += units(sums.x);
        heated += units(sums.y);
    }
    for (int i = 16; i > 0; i /= 2) {
        plain += __shfl_xor_sync(FULL_WARP, plain, i);
        heated += __shfl_xor_sync(FULL_WARP, heated, i);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&totals[0], plain);
        atomicAdd(&totals[1], heated);
    }
    __syncthreads();
    if (threadIdx.x < 2) d.out[row].totals[threadIdx.x] = (double)totals[threadIdx.x] / UNITS;
}

// The tokens whose time is close enough to the earliest.
DEVICE void find_finalists(const DigestRows& d, u32 row, u32* blocks) {
    __shared__ u32 num_blocks_close, num_finalists;
    __shared__ u64 first;
    __shared__ float warp_times[32];
    u32 thread = threadIdx.x;
    RowSummary& out = d.out[row];
    DigestQuery query = d.queries[row];
    float largest = row_largest(d, row);
    if (!(fabsf(largest) < INFINITE) || !query.races) {
        if (thread == 0) out.num_finalists = 0;
        if (thread == 0 && query.races) assume(d, row, NO_TOKEN);
        return;
    }
    if (thread == 0) num_blocks_close = num_finalists = 0;
    if (thread == 0) first = ~0ull;
    const float* times = d.times + (u64)row * d.num_blocks;
    float fastest = INFINITE;
    for (u32 i = thread; i < d.num_blocks; i += blockDim.x) fastest = fminf(fastest, times[i]);
    fastest = -warp_max(-fastest);
    if (thread % 32 == 0) warp_times[thread / 32] = fastest;
    __syncthreads();
    fastest = -warp_max(thread % 32 < blockDim.x / 32 ? -warp_times[thread % 32] : -INFINITE);
    float bound = fastest + RACE_MARGIN;
    for (u32 block = thread; block < d.num_blocks; block += blockDim.x)
        if (times[block] <= bound) blocks[atomicAdd(&num_blocks_close, 1)] = block;
    __syncthreads();
    for (u32 i = thread / 32; i < num_blocks_close; i += blockDim.x / 32) {
        for (u32 k = thread % 32; k < BLOCK; k += 32) {
            u32 token = blocks[i] * BLOCK + k;
            float logit = logit_at(d, row, token);
            float handicap = -__fmul_rn(__fsub_rn(logit, largest), query.inverse);
            float time = race_time(query, token, handicap);
            if (!(time <= bound)) continue;
            atomicMin(&first, finish_key(time, token));
            u32 place = atomicAdd(&num_finalists, 1);
            if (place < MAX_FINALISTS) {
                out.finalist_ids[place] = token;
                out.finalist_logits[place] = logit;
            }
        }
    }
    __syncthreads();
    if (thread != 0) return;
    out.num_finalists = num_finalists <= MAX_FINALISTS ? num_finalists : 0;
    assume(d, row, num_finalists > 0 ? (u32)first : NO_TOKEN);
}

// Three blocks of threads for each row, one for each part of the digest. The first needs only logits and maxima, which
// are in the L2 cache when all blocks of `digest_weights` have started: it runs beside them, and bypasses the L1 cache.
KERNEL void digest_select(DigestRows d) {
    let_next_start();
    if (blockIdx.y > 0) wait_for_previous();
    if (blockIdx.y == 0)
        select_top(d, blockIdx.x);
    else if (blockIdx.y == 1)
        add_sums(d, blockIdx.x);
    else
        find_finalists(d, blockIdx.x, (u32*)keys);
}
