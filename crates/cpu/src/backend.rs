//! [`CpuBackend`]: checks shapes, finds the slices behind tensors, distributes rows over threads and calls the
//! operations.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Mutex;

use pellucid_tensor::{
    Activation, Attend, Attention, Backend, BidirectionalAttention, DType, DeltaNet, Error, ExpertMlp, Extension,
    GatedMlp, HostFloats, HostWeight, Input, KvLayer, Linear, Mamba2, Output, Pending, PlainMlp, Residual, RmsNorm,
    Rope, RoundedGroups, ShortConvolution, StoreKv, TableRows, Tensor,
};

use crate::attention;
use crate::bandwidth::read_bandwidth;
use crate::free_memory::free_memory;
use crate::matmul::{InputRows, LinearWeight, MAX_PRODUCTS, Multiplier, Product, decoded, packed_bytes};
use crate::memory::{self, Buffer, HostMemory, bytes, bytes_mut, floats, floats_mut};
use crate::ops::experts::{Choice, Choices, ExpertBuffers};
use crate::ops::{elementwise, norm, rope};
use crate::pool::{Pool, ThreadRefused};
use crate::recurrence;
use crate::shared_slice::SharedSlice;
use crate::simd::{Isa, Level, with_simd};

/// Options of a [`CpuBackend`].
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    pub num_threads: usize,
    pub isa: Isa,
}

impl Default for CpuOptions {
    /// All cores that this program may use, and the fastest instruction set of this machine.
    fn default() -> Self {
        let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
        CpuOptions { num_threads, isa: Isa::best() }
    }
}

/// The [`Backend`] for CPUs.
pub struct CpuBackend {
    level: Level,
    pool: Pool,
    multiplier: Multiplier,
    experts: Mutex<ExpertBuffers>,
    heads: Mutex<HeadBuffers>,
    /// Number of weights without a kernel for their format, by format name: their rows are decoded in every product.
    decoded: Mutex<BTreeMap<&'static str, usize>>,
}

/// Rows of one head, kept from step to step.
#[derive(Debug, Default)]
struct HeadBuffers {
    input: Buffer<f32>,
    output: Buffer<f32>,
}

/// Reason why a [`CpuBackend`] cannot be created.
#[derive(Debug)]
pub enum Unusable {
    /// This machine does not have the instruction set.
    Isa(Isa),
    /// The operating system refused to start a thread.
    Threads { wanted: usize, obtained: usize, cause: std::io::Error },
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::Isa(isa) => write!(f, "this machine does not have the instruction set {isa}"),
            Unusable::Threads { wanted, obtained, cause } => {
                write!(f, "the operating system started only {obtained} of {wanted} threads: {cause}")
            }
        }
    }
}

impl std::error::Error for Unusable {}

impl CpuBackend {
    pub fn new(options: CpuOptions) -> Result<Self, Unusable> {
        let CpuOptions { num_threads: wanted, isa } = options;
        let level = Level::of(isa).ok_or(Unusable::Isa(isa))?;
        let pool = Pool::new(wanted.max(1)).map_err(|ThreadRefused { obtained, cause }| Unusable::Threads {
            wanted,
            obtained,
            cause,
        })?;
        let (experts, heads, decoded) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(CpuBackend { level, pool, multiplier: Multiplier::new(level), experts, heads, decoded })
    }

    /// Calls `f(row, out_row)` for every row of `out`, on all threads if the tensor is large enough.
    fn for_rows(&self, out: &mut Tensor, f: impl Fn(usize, &mut [f32]) + Sync) {
        let cols = out.cols();
        self.for_each_row(floats_mut(out), cols, f);
    }

    /// Calls `f(row, out_row)` for every row of `cols` values in `out`, like [`CpuBackend::for_rows`].
    fn for_each_row(&self, out: &mut [f32], cols: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        let (num_rows, output) = (out.len() / cols, SharedSlice::new(out));
        self.for_each(num_rows, cols, |row| {
            // SAFETY: `for_each` calls this once for each row, so no two parts overlap.
            f(row, unsafe { output.part(row * cols, cols) });
        });
    }

    /// Calls `f` for every row number below `num_rows`; a row costs as much as `cols` values.
    fn for_each(&self, num_rows: usize, cols: usize, f: impl Fn(usize) + Sync) {
        // With fewer values, waking threads costs more than the work itself.
        const ENOUGH_FOR_THREADS: usize = 16 * 1024;
        const ROW_TASK: usize = 4 * 1024;
        if num_rows * cols < ENOUGH_FOR_THREADS {
            (0..num_rows).for_each(f);
            return;
        }
        // A task holds several short rows: taking a task costs as much as computing a hundred values.
        let per_task = (ROW_TASK / cols).clamp(1, num_rows.div_ceil(4 * self.pool.num_threads()));
        self.pool.run(num_rows.div_ceil(per_task), &|task| {
            (task * per_task..num_rows.min((task + 1) * per_task)).for_each(&f);
        });
    }

    /// Computes a norm without a sum before it, so that products find its rows; a sum and its norm are left to the
    /// products.
    fn prepared<'a>(&self, input: Input<'a>) -> Result<Input<'a>, Error> {
        match input {
            Input::Rows(_) | Input::Joined { residual: Residual { pending: Pending::Update, .. }, .. } => Ok(input),
            input => Ok(Input::Rows(self.input(input)?)),
        }
    }

    fn matmul(&self, x: &[f32], linear: &Linear, out: &mut [f32]) {
        let x = InputRows::rows(x, linear.weight.cols());
        self.multiplier.run(&self.pool, x, &[product(linear, out)]);
    }

    /// Sums the results of the selected experts, which `compute` writes to its last argument. Its second argument has
    /// the rows of one expert, the third the buffers for the outputs of the expert's first maps.
    fn sum_experts<E>(
        &self,
        mlp: &ExpertMlp<'_, E>,
        out: Output<'_>,
        compute: impl Fn(&E, &[f32], [&mut Buffer<f32>; 2], &mut [f32]),
    ) {
        let out = out.rows();
        let hidden = mlp.x.cols();
        assert_eq!((out.rows(), out.cols()), (mlp.x.rows(), hidden));
        let x = floats(mlp.x);
        let mut buffers = self.experts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let ExpertBuffers { choices, rows, gate, up, down } = &mut *buffers;
        choose_experts(mlp, choices);
        let out = floats_mut(out);
        out.fill(0.0);
        let out = SharedSlice::new(out);
        for chosen in choices.by_expert() {
            let num_rows = chosen.len();
            let rows = &mut rows.grow(num_rows * hidden)[..num_rows * hidden];
            let down = &mut down.grow(rows.len())[..num_rows * hidden];
            self.for_each_row(rows, hidden, |i, out| out.copy_from_slice(&x[chosen[i].row * hidden..][..hidden]));
            compute(&mlp.experts[chosen[0].expert], rows, [&mut *gate, &mut *up], down);
            self.add_weighted(chosen, down, hidden, &out);
        }
    }

    /// Computes a row of `out` for each selected expert of each row, in ascending order of experts, then of rows.
    /// `compute` gets the rows of one expert and a buffer, and writes its last argument.
    fn experts_of_rows<E>(
        &self,
        mlp: &ExpertMlp<'_, E>,
        out: &mut Tensor,
        compute: impl Fn(&E, &[f32], &mut Buffer<f32>, &mut [f32]),
    ) {
        let (hidden, width) = (mlp.x.cols(), out.cols());
        let (x, mut rest) = (floats(mlp.x), floats_mut(out));
        let mut buffers = self.experts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let ExpertBuffers { choices, rows, up, .. } = &mut *buffers;
        choose_experts(mlp, choices);
        for chosen in choices.by_expert() {
            let rows = &mut rows.grow(chosen.len() * hidden)[..chosen.len() * hidden];
            self.for_each_row(rows, hidden, |i, out| out.copy_from_slice(&x[chosen[i].row * hidden..][..hidden]));
            let (of_expert, others) = rest.split_at_mut(chosen.len() * width);
            compute(&mlp.experts[chosen[0].expert], rows, up, of_expert);
            rest = others;
        }
        assert!(rest.is_empty(), "a row for each selected expert of each row");
    }

    /// Applies the last map of each selected expert to its rows of `inputs`, which are those of `experts_of_rows`, and
    /// writes the weighted sums.
    fn sum_last_maps<E>(
        &self,
        mlp: &ExpertMlp<'_, E>,
        last: impl Fn(&E) -> &Linear,
        inputs: &Tensor,
        out: &mut Tensor,
    ) {
        let cols = out.cols();
        assert_eq!((out.rows(), inputs.rows()), (mlp.x.rows(), mlp.x.rows() * mlp.routing.num_selected));
        let (mut rest, out) = (floats(inputs), floats_mut(out));
        let mut buffers = self.experts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let ExpertBuffers { choices, down, .. } = &mut *buffers;
        choose_experts(mlp, choices);
        out.fill(0.0);
        let sums = SharedSlice::new(out);
        for chosen in choices.by_expert() {
            let map = last(&mlp.experts[chosen[0].expert]);
            assert_eq!((map.weight.cols(), map.weight.rows()), (inputs.cols(), cols));
            let (rows, others) = rest.split_at(chosen.len() * inputs.cols());
            let results = &mut down.grow(chosen.len() * cols)[..chosen.len() * cols];
            self.matmul(rows, map, results);
            self.add_weighted(chosen, results, cols, &sums);
            rest = others;
        }
    }

    /// Applies a map and an activation to rows.
    fn matmul_active(&self, rows: &[f32], map: &Linear, activation: Activation, out: &mut [f32]) {
        self.matmul(rows, map, out);
        with_simd!(self.level, simd => self.for_each_row(out, map.weight.rows(), |_, out| {
            elementwise::activate(simd, activation, out);
        }));
    }

    /// Adds the results of one expert, `cols` values for each of its rows, to the sums of those rows.
    fn add_weighted(&self, chosen: &[Choice], results: &[f32], cols: usize, sums: &SharedSlice<'_, f32>) {
        self.for_each(chosen.len(), cols, |i| {
            let Choice { row, weight, .. } = chosen[i];
            // SAFETY: an expert has a row at most once, so no two parts overlap.
            let sums = unsafe { sums.part(row * cols, cols) };
            for (sum, result) in sums.iter_mut().zip(&results[i * cols..]) {
                *sum += weight * result;
            }
        });
    }

    fn multiply_gated(&self, x: InputRows<'_>, [gate, up]: [(&Linear, &mut [f32]); 2], activation: Activation) {
        let cols = gate.0.weight.rows();
        let products = [product(gate.0, gate.1), product(up.0, up.1)];
        if self.multiplier.run_gated(&self.pool, x, &products, activation) {
            return;
        }
        self.multiplier.run(&self.pool, x, &products);
        with_simd!(self.level, simd => self.for_each_row(gate.1, cols, |row, gate| {
            elementwise::gate(simd, activation, &up.1[row * cols..(row + 1) * cols], gate);
        }));
    }
}

/// Calls `f` with the rows of an input. Rows of [`Input::Joined`] are computed by the thread that reads them first.
fn with_rows(level: Level, input: Input<'_>, f: impl FnOnce(InputRows<'_>)) {
    match input {
        Input::Rows(x) => f(InputRows::rows(floats(x), x.cols())),
        Input::Normed { .. } => unreachable!("`CpuBackend::prepared` computes it"),
        Input::Joined { residual: Residual { hidden, update, pending }, weight, eps, normed } => {
            *pending = Pending::Nothing;
            with_joined(level, (update, hidden), (weight, eps), normed, f);
        }
    }
}

/// Calls `f` with the RMSNorm of `hidden += update`, which `f` computes where it reads it.
fn with_joined(
    level: Level,
    (update, hidden): (&Tensor, &mut Tensor),
    (weight, eps): (&Tensor, f32),
    normed: &mut Tensor,
    f: impl FnOnce(InputRows<'_>),
) {
    let cols = update.cols();
    assert_eq!((hidden.rows(), hidden.cols()), (update.rows(), cols));
    assert_eq!((normed.rows(), normed.cols(), weight.len()), (update.rows(), cols, cols));
    let (update, weight) = (floats(update), floats(weight));
    let num_rows = hidden.rows();
    let [hidden, normed] = [hidden, normed].map(|tensor| SharedSlice::new(floats_mut(tensor)));
    let join = |rows: Range<usize>| {
        for start in rows.map(|row| row * cols) {
            // SAFETY: `InputRows` computes each row once, so no two parts overlap.
            let (hidden, normed) = unsafe { (hidden.part(start, cols), normed.part(start, cols)) };
            with_simd!(level, simd => {
                elementwise::add(simd, &update[start..start + cols], hidden);
                norm::rms_norm(simd, hidden, weight, eps, normed);
            });
        }
    };
    // SAFETY: `join` writes exactly the rows that it is called for, and nothing else uses `normed` meanwhile.
    f(unsafe { InputRows::computed(normed, cols, num_rows, &join) });
}

/// Chooses the experts of each row.
fn choose_experts<E>(mlp: &ExpertMlp<'_, E>, choices: &mut Choices) {
    let num_experts = mlp.experts.len();
    assert_eq!((mlp.router_logits.rows(), mlp.router_logits.cols()), (mlp.x.rows(), num_experts));
    choices.choose(floats(mlp.router_logits), num_experts, mlp.routing, mlp.score_bias.map(floats));
    if let Some(scales) = mlp.expert_scales {
        assert_eq!(scales.len(), num_experts);
        choices.scale(floats(scales));
    }
}

fn product<'a>(linear: &'a Linear, out: &'a mut [f32]) -> Product<'a> {
    let bias = linear.bias.as_ref().map(floats);
    Product { weight: linear_weight(linear), bias, out: SharedSlice::new(out) }
}

fn linear_weight(linear: &Linear) -> &LinearWeight {
    linear.weight.memory().as_any().downcast_ref().expect("a weight made by `linear_weight` of the CPU backend")
}

impl fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.description())
    }
}

impl Backend for CpuBackend {
    fn remarks(&self) -> Vec<String> {
        let decoded = self.decoded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let remark = |(dtype, count): (&&str, &usize)| {
            format!(
                "{count} weights in {dtype} have no CPU kernel: their rows are decoded in every product, which is slow"
            )
        };
        decoded.iter().map(remark).collect()
    }

    fn supports(&self, _extension: Extension) -> bool {
        true
    }

    fn description(&self) -> String {
        let num_threads = self.pool.num_threads();
        let plural = if num_threads == 1 { "" } else { "s" };
        format!("cpu ({}, {num_threads} thread{plural})", self.level.isa())
    }

    fn arithmetic(&self) -> String {
        format!("cpu ({})", self.level.isa())
    }

    fn activation_dtype(&self) -> DType {
        DType::F32
    }

    fn free_memory(&self) -> Option<u64> {
        free_memory()
    }

    fn stored_bytes(&self, dtype: DType, len: usize) -> Option<u64> {
        packed_bytes(dtype, len).or_else(|| dtype.bytes_for(len).map(|bytes| bytes as u64))
    }

    fn read_bandwidth(&self, size: usize) -> Result<f64, Error> {
        with_simd!(self.level, simd => read_bandwidth(simd, &self.pool, size))
    }

    fn zeros(&self, dtype: DType, rows: usize, cols: usize) -> Result<Tensor, Error> {
        let too_large = || Error::OutOfMemory { device: "the CPU".into(), bytes: usize::MAX };
        let len = rows.checked_mul(cols).and_then(|len| dtype.bytes_for(len)).ok_or_else(too_large)?;
        // Huge pages, because keys and values are read sequentially. The system still provides a page only when it
        // is touched.
        let memory = HostMemory::zeroed(len)?;
        memory.prefer_huge_pages();
        Ok(Tensor::new(dtype, rows, cols, Box::new(memory)))
    }

    fn resize_rows(&self, tensor: &mut Tensor, rows: usize) -> Result<(), Error> {
        memory::resize_rows(tensor, rows)
    }

    fn weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        let HostWeight { dtype, rows, cols, bytes } = weight;
        assert_eq!(Some(bytes.len()), dtype.bytes_for(rows * cols), "the bytes of a weight match its shape");
        // f32 weights (norms and biases) are read in place, which requires the alignment of f32.
        let is_misaligned = dtype == DType::F32 && bytes.as_ptr().align_offset(align_of::<f32>()) != 0;
        let memory = if is_misaligned { HostMemory::copied(&bytes)? } else { HostMemory::Mapped(bytes) };
        Ok(Tensor::new(dtype, rows, cols, Box::new(memory)))
    }

    fn linear_weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        let HostWeight { dtype, rows, cols, ref bytes } = weight;
        assert_eq!(Some(bytes.len()), dtype.bytes_for(rows * cols), "the bytes of a weight match its shape");
        let memory = LinearWeight::new(&self.pool, weight)?;
        if memory.is_decoded() {
            let mut decoded = self.decoded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            *decoded.entry(dtype.name()).or_default() += 1;
        }
        Ok(Tensor::new(dtype, rows, cols, Box::new(memory)))
    }

    fn read(&self, tensor: &Tensor, out: &mut [f32]) -> Result<(), Error> {
        with_simd!(self.level, simd => decoded::decode_row(simd, tensor.dtype(), bytes(tensor), out));
        Ok(())
    }

    fn host_floats(&self, len: usize) -> Result<Box<dyn HostFloats>, Error> {
        let memory = HostMemory::zeroed(len * size_of::<f32>())?;
        memory.prefer_huge_pages();
        Ok(Box::new(memory))
    }

    fn read_out(&self, tensor: &mut Tensor, out: &mut dyn HostFloats) -> Result<(), Error> {
        if memory::exchange(tensor, out) {
            return Ok(());
        }
        self.read(tensor, &mut out.get_mut()[..tensor.len()])
    }

    fn read_row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) -> Result<(), Error> {
        let bytes =
            bytes(tensor).chunks_exact(bytes(tensor).len() / tensor.rows()).nth(row).expect("a row of the tensor");
        with_simd!(self.level, simd => decoded::decode_row(simd, tensor.dtype(), bytes, out));
        Ok(())
    }

    fn copy_row(&self, from: usize, to: usize, tensor: &mut Tensor) -> Result<(), Error> {
        let rows = tensor.rows();
        assert!(from < rows && to < rows, "rows of the tensor");
        let bytes = bytes_mut(tensor);
        let len = bytes.len() / rows;
        bytes.copy_within(from * len..(from + 1) * len, to * len);
        Ok(())
    }

    fn copy_rows(&self, from: &Tensor, rows: &[u32], to: &mut Tensor, first: usize) -> Result<(), Error> {
        assert_eq!((from.dtype(), from.cols()), (to.dtype(), to.cols()), "rows of the same form");
        assert!(first + rows.len() <= to.rows(), "rows of the tensor");
        let len = from.dtype().bytes_for(from.cols()).expect("rows are whole blocks");
        let (from, to) = (bytes(from), bytes_mut(to));
        for (to, &row) in to[first * len..].chunks_exact_mut(len).zip(rows) {
            to.copy_from_slice(&from[row as usize * len..][..len]);
        }
        Ok(())
    }

    fn write(&self, values: &[f32], tensor: &mut Tensor) -> Result<(), Error> {
        floats_mut(tensor).copy_from_slice(values);
        Ok(())
    }

    fn embed(&self, table: &Tensor, rows: TableRows<'_>, scale: f32, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (rows.len(), table.cols()));
        let dtype = table.dtype();
        let row_bytes = dtype.bytes_for(table.cols()).expect("rows are whole blocks");
        let table = bytes(table);
        with_simd!(self.level, simd => self.for_rows(out, |row, out| {
            let start = rows.get(row) as usize * row_bytes;
            decoded::decode_row(simd, dtype, &table[start..start + row_bytes], out);
            if scale != 1.0 {
                elementwise::scale(simd, scale, out);
            }
        }));
        Ok(())
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (rows.len(), x.cols()));
        let (cols, x) = (x.cols(), floats(x));
        self.for_rows(out, |row, out| out.copy_from_slice(&x[rows[row] as usize * cols..][..cols]));
        Ok(())
    }

    fn scatter_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((x.rows(), x.cols()), (rows.len(), out.cols()));
        let (cols, x, out) = (x.cols(), floats(x), floats_mut(out));
        for (x, &row) in x.chunks_exact(cols).zip(rows) {
            out[row as usize * cols..][..cols].copy_from_slice(x);
        }
        Ok(())
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (x.rows(), x.cols()));
        assert!(x.cols().is_multiple_of(weight.len()));
        let (cols, x, weight) = (x.cols(), floats(x), floats(weight));
        with_simd!(self.level, simd => self.for_rows(out, |row, out| {
            let x = &x[row * cols..(row + 1) * cols];
            for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
                norm::rms_norm(simd, x, weight, eps, out);
            }
        }));
        Ok(())
    }

    fn grouped_rms_norm(&self, x: &Tensor, norm: RmsNorm<'_>, group_len: usize, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (x.rows(), x.cols()));
        assert!(norm.weight.len() == x.cols() && x.cols().is_multiple_of(group_len));
        let (cols, x, weight) = (x.cols(), floats(x), floats(norm.weight));
        with_simd!(self.level, simd => self.for_rows(out, |row, out| {
            norm::grouped_rms_norm(simd, &x[row * cols..(row + 1) * cols], (weight, group_len), norm.eps, out);
        }));
        Ok(())
    }

    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (x.rows(), x.cols()));
        assert_eq!((weight.len(), bias.len()), (x.cols(), x.cols()));
        let (cols, x, weight, bias) = (x.cols(), floats(x), floats(weight), floats(bias));
        with_simd!(self.level, simd => self.for_rows(out, |row, out| {
            norm::layer_norm(simd, &x[row * cols..(row + 1) * cols], weight, bias, eps, out);
        }));
        Ok(())
    }

    fn add(&self, y: &Tensor, x: &mut Tensor) -> Result<(), Error> {
        assert_eq!((x.rows(), x.cols()), (y.rows(), y.cols()));
        let (cols, y) = (y.cols(), floats(y));
        with_simd!(self.level, simd => self.for_rows(x, |row, x| {
            elementwise::add(simd, &y[row * cols..(row + 1) * cols], x);
        }));
        Ok(())
    }

    fn add_rms_norm(
        &self,
        update: &Tensor,
        hidden: &mut Tensor,
        weight: &Tensor,
        eps: f32,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        with_joined(self.level, (update, hidden), (weight, eps), out, |x| _ = x.ready(&self.pool));
        Ok(())
    }

    fn soft_cap(&self, cap: f32, x: &mut Tensor) -> Result<(), Error> {
        with_simd!(self.level, simd => self.for_rows(x, |_, x| elementwise::soft_cap(simd, cap, x)));
        Ok(())
    }

    fn input_rounding(&self, linear: &Linear) -> Option<RoundedGroups> {
        linear_weight(linear).input_rounding()
    }

    fn linear(&self, x: &Tensor, linear: &Linear, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((x.cols(), out.cols()), (linear.weight.cols(), linear.weight.rows()));
        assert_eq!(x.rows(), out.rows());
        self.matmul(floats(x), linear, floats_mut(out));
        Ok(())
    }

    fn linears(&self, x: Input<'_>, maps: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error> {
        if maps.len() > MAX_PRODUCTS {
            let x = self.input(x)?;
            return maps.chunks_mut(MAX_PRODUCTS).try_for_each(|maps| self.linears(Input::Rows(x), maps));
        }
        with_rows(self.level, self.prepared(x)?, |x| {
            let mut products = [None; MAX_PRODUCTS];
            for (slot, (linear, out)) in products.iter_mut().zip(maps) {
                assert_eq!((out.rows(), out.cols()), (x.num_rows(), linear.weight.rows()));
                *slot = Some(product(linear, floats_mut(out)));
            }
            self.multiplier.run(&self.pool, x, products.iter().flatten());
        });
        Ok(())
    }

    fn gated(
        &self,
        x: Input<'_>,
        [(gate, gate_out), (up, up_out)]: [(&Linear, &mut Tensor); 2],
        activation: Activation,
    ) -> Result<(), Error> {
        with_rows(self.level, self.prepared(x)?, |x| {
            assert_eq!((gate_out.rows(), gate_out.cols()), (x.num_rows(), gate.weight.rows()));
            assert_eq!((up_out.rows(), up_out.cols()), (x.num_rows(), up.weight.rows()));
            self.multiply_gated(x, [(gate, floats_mut(gate_out)), (up, floats_mut(up_out))], activation);
        });
        Ok(())
    }

    fn activate(&self, activation: Activation, x: &mut Tensor) -> Result<(), Error> {
        with_simd!(self.level, simd => self.for_rows(x, |_, x| elementwise::activate(simd, activation, x)));
        Ok(())
    }

    fn gate(&self, activation: Activation, up: &Tensor, gate: &mut Tensor) -> Result<(), Error> {
        assert_eq!((gate.rows(), gate.cols()), (up.rows(), up.cols()));
        let (cols, up) = (up.cols(), floats(up));
        with_simd!(self.level, simd => self.for_rows(gate, |row, gate| {
            elementwise::gate(simd, activation, &up[row * cols..(row + 1) * cols], gate);
        }));
        Ok(())
    }

    fn sigmoid_gate(&self, gate: &Tensor, x: &mut Tensor) -> Result<(), Error> {
        assert_eq!(gate.rows(), x.rows());
        assert!([1, x.cols()].contains(&gate.cols()));
        let (cols, gate) = (gate.cols(), floats(gate));
        with_simd!(self.level, simd => self.for_rows(x, |row, x| {
            elementwise::sigmoid_gate(simd, &gate[row * cols..(row + 1) * cols], x);
        }));
        Ok(())
    }

    fn gate_by_columns(
        &self,
        activation: Activation,
        inputs: &Tensor,
        first: usize,
        gate: &mut Tensor,
    ) -> Result<(), Error> {
        let (len, cols) = (gate.cols(), inputs.cols());
        assert!(gate.rows() == inputs.rows() && first + len <= cols);
        let inputs = floats(inputs);
        with_simd!(self.level, simd => self.for_rows(gate, |row, gate| {
            elementwise::gate(simd, activation, &inputs[row * cols + first..][..len], gate);
        }));
        Ok(())
    }

    fn scale(&self, factor: f32, x: &mut Tensor) -> Result<(), Error> {
        with_simd!(self.level, simd => self.for_rows(x, |_, x| elementwise::scale(simd, factor, x)));
        Ok(())
    }

    fn expert_mlp(&self, mlp: ExpertMlp<'_>, out: Output<'_>) -> Result<(), Error> {
        self.sum_experts(&mlp, out, |expert: &GatedMlp, rows, [gate, up], down| {
            let len = rows.len() / mlp.x.cols() * expert.gate.weight.rows();
            let (gate, up) = (&mut gate.grow(len)[..len], &mut up.grow(len)[..len]);
            let products = [(&expert.gate, &mut *gate), (&expert.up, up)];
            self.multiply_gated(InputRows::rows(rows, mlp.x.cols()), products, mlp.activation);
            self.matmul(gate, &expert.down, down);
        });
        Ok(())
    }

    fn expert_gates(&self, mlp: &ExpertMlp<'_>, out: &mut Tensor) -> Result<(), Error> {
        self.experts_of_rows(mlp, out, |GatedMlp { gate, up: up_map, .. }, rows, up, gated| {
            let up = &mut up.grow(gated.len())[..gated.len()];
            let products = [(gate, gated), (up_map, up)];
            self.multiply_gated(InputRows::rows(rows, mlp.x.cols()), products, mlp.activation);
        });
        Ok(())
    }

    fn expert_sums(&self, mlp: &ExpertMlp<'_>, gated: &Tensor, out: &mut Tensor) -> Result<(), Error> {
        self.sum_last_maps(mlp, |expert| &expert.down, gated, out);
        Ok(())
    }

    fn plain_expert_activations(&self, mlp: &ExpertMlp<'_, PlainMlp>, out: &mut Tensor) -> Result<(), Error> {
        self.experts_of_rows(mlp, out, |expert: &PlainMlp, rows, _, active| {
            self.matmul_active(rows, &expert.up, mlp.activation, active);
        });
        Ok(())
    }

    fn plain_expert_sums(&self, mlp: &ExpertMlp<'_, PlainMlp>, active: &Tensor, out: &mut Tensor) -> Result<(), Error> {
        self.sum_last_maps(mlp, |expert| &expert.down, active, out);
        Ok(())
    }

    fn plain_expert_mlp(&self, mlp: ExpertMlp<'_, PlainMlp>, out: Output<'_>) -> Result<(), Error> {
        self.sum_experts(&mlp, out, |expert: &PlainMlp, rows, [_, up], down| {
            let len = rows.len() / mlp.x.cols() * expert.up.weight.rows();
            let up = &mut up.grow(len)[..len];
            self.matmul_active(rows, &expert.up, mlp.activation, up);
            self.matmul(up, &expert.down, down);
        });
        Ok(())
    }

    fn map_heads(&self, x: &Tensor, maps: &[Linear], out: &mut Tensor) -> Result<(), Error> {
        let (num_rows, num_heads) = (x.rows(), maps.len());
        assert!(num_heads > 0 && out.rows() == num_rows);
        assert!([x.cols(), out.cols()].into_iter().all(|cols| cols.is_multiple_of(num_heads)));
        let [cols, out_cols] = [x.cols(), out.cols()].map(|cols| cols / num_heads);
        assert!(maps.iter().all(|map| (map.weight.cols(), map.weight.rows()) == (cols, out_cols)));
        let (x, out) = (floats(x), floats_mut(out));
        if num_rows == 1 {
            let heads = x.chunks_exact(cols).zip(out.chunks_exact_mut(out_cols));
            heads.zip(maps).for_each(|((x, out), map)| self.matmul(x, map, out));
            return Ok(());
        }
        let mut buffers = self.heads.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let HeadBuffers { input, output } = &mut *buffers;
        let input = &mut input.grow(num_rows * cols)[..num_rows * cols];
        let output = &mut output.grow(num_rows * out_cols)[..num_rows * out_cols];
        let out = SharedSlice::new(out);
        for (head, map) in maps.iter().enumerate() {
            let at = |row: usize| row * num_heads + head;
            self.for_each_row(input, cols, |row, head| head.copy_from_slice(&x[at(row) * cols..][..cols]));
            self.matmul(input, map, output);
            self.for_each(num_rows, out_cols, |row| {
                // SAFETY: this is called once for each row, so no two parts overlap.
                let head = unsafe { out.part(at(row) * out_cols, out_cols) };
                head.copy_from_slice(&output[row * out_cols..][..out_cols]);
            });
        }
        Ok(())
    }

    fn join_heads(&self, num_heads: usize, parts: [&Tensor; 2], out: &mut Tensor) -> Result<(), Error> {
        let cols = parts.map(|part| part.cols() / num_heads);
        assert!(
            parts.iter().zip(cols).all(|(part, cols)| (part.rows(), part.cols()) == (out.rows(), num_heads * cols))
        );
        assert_eq!(out.cols(), num_heads * (cols[0] + cols[1]));
        let parts = parts.map(floats);
        self.for_rows(out, |row, out| {
            for (head, out) in out.chunks_exact_mut(cols[0] + cols[1]).enumerate() {
                let part = |part: usize| &parts[part][(row * num_heads + head) * cols[part]..][..cols[part]];
                out[..cols[0]].copy_from_slice(part(0));
                out[cols[0]..].copy_from_slice(part(1));
            }
        });
        Ok(())
    }

    fn rope_angles(&self, positions: &[u32], frequencies: &[f32], factor: f32, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (positions.len(), 2 * frequencies.len()));
        self.for_rows(out, |row, out| rope::angles_row(positions[row], frequencies, factor, out));
        Ok(())
    }

    fn rope(&self, rope: Rope<'_>, x: &mut Tensor) -> Result<(), Error> {
        assert_eq!(rope.angles.rows(), x.rows());
        assert!(rope.angles.cols() <= rope.head_size && x.cols().is_multiple_of(rope.head_size));
        let (cols, angles) = (rope.angles.cols(), floats(rope.angles));
        with_simd!(self.level, simd => self.for_rows(x, |row, x| {
            rope::rotate_row(simd, x, &angles[row * cols..(row + 1) * cols], rope.head_size, rope.style);
        }));
        Ok(())
    }

    fn store_kv(&self, store: StoreKv<'_>, kv: &mut KvLayer) -> Result<(), Error> {
        attention::store(self.level, &self.pool, &store, kv);
        Ok(())
    }

    fn attention(&self, attention: Attention<'_>, out: &mut Tensor) -> Result<(), Error> {
        attention::attention(self.level, &self.pool, &attention, out);
        Ok(())
    }

    fn bidirectional_attention(&self, call: BidirectionalAttention<'_>, out: &mut Tensor) -> Result<(), Error> {
        attention::bidirectional(self.level, &self.pool, &call, out);
        Ok(())
    }

    fn attend(
        &self,
        attend: Attend<'_>,
        queries: &mut Tensor,
        keys: &mut Tensor,
        kv: &mut KvLayer,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        attention::attend(self.level, &self.pool, &attend, [queries, keys], kv, out);
        Ok(())
    }

    fn short_convolution(
        &self,
        call: ShortConvolution<'_>,
        memory: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        recurrence::short_convolution(self.level, &self.pool, &call, memory, out);
        Ok(())
    }

    fn delta_net(&self, call: DeltaNet<'_>, memory: &mut Tensor, out: &mut Tensor) -> Result<(), Error> {
        recurrence::delta_net(self.level, &self.pool, &call, memory, out);
        Ok(())
    }

    fn mamba2(&self, call: Mamba2<'_>, memory: &mut Tensor, out: &mut Tensor) -> Result<(), Error> {
        recurrence::mamba2(self.level, &self.pool, &call, memory, out);
        Ok(())
    }
}
