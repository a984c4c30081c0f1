//! Speed of attention beside the machine's limits: memory bandwidth for one row, arithmetic for a chunk of rows.
//!
//! `cargo bench -p pellucid-cpu --bench attention [-- --threads N] [-- --isa NAME]`. The layers of a model are used in
//! turn, more of them than the last-level cache holds, so that keys and values come from memory as they do in a real
//! step. The fastest of several runs counts, because other programs may run on the machine.

use std::hint::black_box;
use std::time::{Duration, Instant};

use pellucid_cpu::{CpuBackend, CpuOptions};
use pellucid_tensor::{Attention, Backend, DType, HeadShape, KvLayer, SequenceSpan, StoreKv, Tensor};

const BLOCK_LEN: usize = 32;
/// Bytes of keys and values that are read before any is read again: more than any cache holds.
const BEYOND_CACHES: usize = 400 << 20;
const FORMATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::Q8_0];

fn main() {
    let mut options = CpuOptions::default();
    let arguments: Vec<String> = std::env::args().collect();
    for pair in arguments.windows(2) {
        match pair[0].as_str() {
            "--threads" => options.num_threads = pair[1].parse().expect("a number of threads"),
            "--isa" => options.isa = pair[1].parse().expect("an instruction set"),
            _ => {}
        }
    }
    let backend = CpuBackend::new(options).expect("an instruction set of this machine");
    println!("{}", backend.description());
    println!("memory read: {:.1} GB/s", read_bandwidth(options.num_threads));
    let shapes = [(32, 8, 64), (9, 3, 64), (32, 8, 128)];
    println!("\none row: GB/s of keys and values read, microseconds per layer");
    println!("{:>16} {:>7} {:>16} {:>16} {:>16} {:>16}", "heads/kv/size", "depth", "F32", "F16", "BF16", "Q8_0");
    for shape in shapes {
        for depth in [512, 4096, 16384] {
            print!("{:>16} {depth:>7}", format!("{}/{}/{}", shape.0, shape.1, shape.2));
            for dtype in FORMATS {
                let mut bench = Bench::new(&backend, shape, dtype, depth, 1);
                let (seconds, bytes) = (bench.best(depth - 1, 1), bench.layer_bytes);
                print!(" {:>6.1} {:>6.0} us", bytes as f64 / seconds / 1e9, seconds * 1e6);
            }
            println!();
        }
    }
    println!("\nsixteen sequences of one row: microseconds per layer, from memory and from the cache");
    println!("{:>16} {:>7} {:>16} {:>16} {:>16} {:>16}", "heads/kv/size", "depth", "F32", "F16", "BF16", "Q8_0");
    for shape in shapes {
        for depth in [32, 64, 256] {
            print!("{:>16} {depth:>7}", format!("{}/{}/{}", shape.0, shape.1, shape.2));
            for dtype in FORMATS {
                let mut bench = Bench::of_sequences(&backend, shape, dtype, depth, 16);
                let [memory, cache] = [false, true].map(|cached| bench.best_of_sequences(16, depth, cached));
                print!(" {:>6.0} {:>6.0} us", memory * 1e6, cache * 1e6);
            }
            println!();
        }
    }
    println!("\na whole prompt: GFLOP/s, milliseconds per layer");
    println!("{:>16} {:>7} {:>16} {:>16} {:>16} {:>16}", "heads/kv/size", "rows", "F32", "F16", "BF16", "Q8_0");
    for shape in shapes {
        for rows in [512, 2048] {
            print!("{:>16} {rows:>7}", format!("{}/{}/{}", shape.0, shape.1, shape.2));
            for dtype in FORMATS {
                let seconds = Bench::new(&backend, shape, dtype, rows, rows).best(0, rows);
                // Two products, of a multiplication and an addition each, for every query and position that it sees.
                let operations = 4.0 * (shape.0 * shape.2) as f64 * (rows * (rows + 1) / 2) as f64;
                print!(" {:>6.0} {:>6.2} ms", operations / seconds / 1e9, seconds * 1e3);
            }
            println!();
        }
    }
}

/// Returns the GB/s at which all threads add up memory that no cache holds: the limit for one row of attention.
fn read_bandwidth(num_threads: usize) -> f64 {
    let numbers = vec![1u64; BEYOND_CACHES / 8];
    let part = numbers.len() / num_threads;
    let best = best_of(|| {
        std::thread::scope(|scope| {
            for part in numbers.chunks(part) {
                scope.spawn(|| {
                    let mut sums = [0u64; 8];
                    for eight in part.chunks_exact(8) {
                        (0..8).for_each(|i| sums[i] = sums[i].wrapping_add(eight[i]));
                    }
                    black_box(sums);
                });
            }
        });
    });
    BEYOND_CACHES as f64 / best / 1e9
}

/// Returns the seconds of the fastest run of those that fit into 1.5 seconds; at least three.
fn best_of(mut work: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < 3 || begin.elapsed() < Duration::from_millis(1500) {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

struct Bench<'a> {
    backend: &'a CpuBackend,
    shape: HeadShape,
    layers: Vec<KvLayer>,
    next_layer: usize,
    layer_bytes: usize,
    queries: Tensor,
    out: Tensor,
    block_table: Vec<u32>,
}

impl<'a> Bench<'a> {
    /// Layers filled with keys and values of `depth` positions; for one row, more layers than the caches hold.
    fn new(backend: &'a CpuBackend, shape: (usize, usize, usize), dtype: DType, depth: usize, rows: usize) -> Self {
        let (num_heads, num_kv_heads, head_size) = shape;
        let shape = HeadShape { num_heads, num_kv_heads, head_size, block_len: BLOCK_LEN };
        let cols = num_kv_heads * head_size;
        let num_blocks = depth.div_ceil(BLOCK_LEN);
        let layer_bytes = 2 * dtype.bytes_for(depth * cols).expect("whole blocks");
        let num_layers = if rows > 1 { 1 } else { BEYOND_CACHES.div_ceil(layer_bytes) };
        let rows_to_store = activation(backend, depth, cols);
        let slots: Vec<u32> = (0..depth as u32).collect();
        let layers = (0..num_layers)
            .map(|_| {
                let blocks = || backend.zeros(dtype, num_blocks, BLOCK_LEN * cols).expect("memory");
                let mut layer = KvLayer { keys: blocks(), values: blocks() };
                let store = StoreKv { keys: &rows_to_store, values: &rows_to_store, slots: &slots, shape };
                backend.store_kv(store, &mut layer).expect("a store");
                layer
            })
            .collect();
        Bench {
            backend,
            shape,
            layers,
            next_layer: 0,
            layer_bytes,
            queries: activation(backend, rows, num_heads * head_size),
            out: backend.zeros(DType::F32, rows, num_heads * head_size).expect("memory"),
            block_table: (0..num_blocks as u32).collect(),
        }
    }

    /// Layers for several sequences of one row each, with `depth` positions for each sequence.
    fn of_sequences(
        backend: &'a CpuBackend,
        shape: (usize, usize, usize),
        dtype: DType,
        depth: usize,
        num_sequences: usize,
    ) -> Self {
        let cols = shape.0 * shape.2;
        Bench {
            queries: activation(backend, num_sequences, cols),
            out: backend.zeros(DType::F32, num_sequences, cols).expect("memory"),
            ..Bench::new(backend, shape, dtype, num_sequences * depth, 1)
        }
    }

    /// Returns the seconds per layer for `rows` rows from position `first` on, in the fastest run. A run has enough
    /// layers that the resolution of the clock does not matter.
    fn best(&mut self, first: usize, rows: usize) -> f64 {
        let positions: Vec<u32> = (first..first + rows).map(|position| position as u32).collect();
        let sequences = [SequenceSpan { rows: 0..rows, blocks: 0..self.block_table.len() }];
        let layers_per_run = if rows > 1 { 1 } else { (self.layers.len()).min((32 << 20) / self.layer_bytes + 1) };
        self.best_layer(&positions, &sequences, layers_per_run, true)
    }

    /// Returns the seconds per layer for several sequences of one row each, which see `depth` positions: with all
    /// layers in turn, or with the same layer again and again.
    fn best_of_sequences(&mut self, num_sequences: usize, depth: usize, cached: bool) -> f64 {
        let blocks = depth.div_ceil(BLOCK_LEN);
        let positions = vec![depth as u32 - 1; num_sequences];
        let sequences: Vec<SequenceSpan> =
            (0..num_sequences).map(|i| SequenceSpan { rows: i..i + 1, blocks: i * blocks..(i + 1) * blocks }).collect();
        const LAYERS: usize = 30;
        self.best_layer(&positions, &sequences, LAYERS, !cached)
    }

    /// Returns the seconds per layer in the fastest run of `num_layers` layers: with `goes_on` all layers in turn,
    /// otherwise the same layer again and again.
    fn best_layer(&mut self, positions: &[u32], sequences: &[SequenceSpan], num_layers: usize, goes_on: bool) -> f64 {
        let seconds = best_of(|| {
            for _ in 0..num_layers {
                let attention = Attention {
                    queries: &self.queries,
                    kv: &self.layers[self.next_layer],
                    positions,
                    sequences,
                    block_tables: &self.block_table,
                    shape: self.shape,
                    scale: 0.125,
                    soft_cap: None,
                    window: None,
                };
                self.backend.attention(attention, &mut self.out).expect("attention");
                if goes_on {
                    self.next_layer = (self.next_layer + 1) % self.layers.len();
                }
            }
        });
        seconds / num_layers as f64
    }
}

/// Values between -1 and 1.
fn activation(backend: &CpuBackend, rows: usize, cols: usize) -> Tensor {
    let mut tensor = backend.zeros(DType::F32, rows, cols).expect("memory");
    let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0).collect();
    backend.write(&values, &mut tensor).expect("a write");
    tensor
}
