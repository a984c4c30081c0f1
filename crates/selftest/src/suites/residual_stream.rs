//! Fused operations on the residual stream, to the bit: they equal norms, products, gates and additions, run one after
//! the other outside of a step.
//!
//! A device may fuse more inside of [`Backend::step`] than outside, and may replay a step that it recorded. So every
//! fused operation runs outside of a step and in several steps on the same tensors.

use pellucid_tensor::{
    Activation, Backend, DType, Error, ExpertMlp, GatedMlp, GatedMlpCall, Input, Linear, Output, Pending, Residual,
    RmsNorm, Routing, SequenceSpan, StepIndex, StepMemo, Tensor, TokenSource,
};

use super::harness::Harness;
use super::random_data::RandomData;

/// Numbers of rows on both sides of the limits at which devices choose other kernels: 2, 8, 16 and 64 rows.
const NUM_ROWS: [usize; 8] = [1, 2, 3, 8, 9, 16, 40, 128];
/// Formats of gate and up; down has that of gate. The last pair needs two launches, or a kernel that reads both.
const FORMATS: [[DType; 2]; 6] = [
    [DType::F32; 2],
    [DType::BF16; 2],
    [DType::Q8_0; 2],
    [DType::Q4_0; 2],
    [DType::Q4_K; 2],
    [DType::Q4_K, DType::Q6_K],
];
/// Columns of the stream and of the MLP: the fewest that every format has.
const SMALL: [usize; 2] = [256, 256];
/// Columns for a device that replays steps. A CUDA product of one or two rows computes a norm of at least 1024 columns,
/// and a product of more than eight rows and at least 512 columns leaves partial sums.
const WIDE: [usize; 2] = [1024, 512];
/// Columns for BF16 on a device that replays steps: a CUDA product of gate and up gates its result if the stream is too
/// narrow for partial sums.
const NARROW: [usize; 2] = [256, 768];
const NUM_EXPERTS: usize = 4;
const ROUTING: Routing = Routing::softmax(2, true);
const ACTIVATION: Activation = Activation::Silu;
const EPS: f32 = 1e-5;
/// Steps of a device that may record them. The first allocates memory, which invalidates recordings; the second runs,
/// the third is recorded, and the fourth replays the recording.
const NUM_STEPS: usize = 4;

/// Checks that a product into the residual stream equals a product and an addition.
pub fn product_equals_its_parts(backend: &dyn Backend) {
    check(backend, &[Operation { source: Source::Product, then: Then::Join }]);
}

/// Checks that products, gated or not, of a norm of the residual stream equal an addition, a norm, products and a gate.
pub fn normed_products_equal_their_parts(backend: &dyn Backend) {
    let operations = [
        (Source::Normed, Then::Products),
        (Source::Normed, Then::Gated),
        (Source::Stream, Then::Products),
        (Source::Update, Then::Gated),
        (Source::Product, Then::Products),
        (Source::Product, Then::Gated),
    ];
    check(backend, &operations.map(|(source, then)| Operation { source, then }));
}

/// Checks that a gated MLP equals an addition, a norm, three products, a gate and another addition.
pub fn gated_mlp_equals_its_parts(backend: &dyn Backend) {
    let mlp = |source, adds_to_stream| Operation { source, then: Then::Mlp { adds_to_stream } };
    check(backend, &[mlp(Source::Rows, false), mlp(Source::Stream, true), mlp(Source::Product, true)]);
}

/// Checks that experts whose sum goes into the residual stream equal experts and an addition.
pub fn experts_equal_their_parts(backend: &dyn Backend) {
    let mut harness = Harness { backend, random: RandomData(9) };
    for formats in FORMATS {
        let layer = Layer::new(&mut harness, formats, SMALL, NUM_EXPERTS);
        for num_rows in NUM_ROWS {
            layer.check(&harness, Operation { source: Source::Product, then: Then::Experts }, num_rows);
        }
    }
}

fn check(backend: &dyn Backend, operations: &[Operation]) {
    let mut harness = Harness { backend, random: RandomData(8) };
    let replays = backend.is_asynchronous();
    let layers = FORMATS.map(|formats| (formats, if replays { WIDE } else { SMALL }));
    let narrow = replays.then_some(([DType::BF16; 2], NARROW));
    for (formats, widths) in layers.into_iter().chain(narrow) {
        let layer = Layer::new(&mut harness, formats, widths, 0);
        for num_rows in NUM_ROWS {
            for &operation in operations {
                layer.check(&harness, operation, num_rows);
            }
        }
    }
}

/// The input of the operation after it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Source {
    /// `normed` as it is.
    Rows,
    /// The norm of the stream, as a tensor.
    Normed,
    /// The norm of the stream, which has no pending update.
    Stream,
    /// The norm of the stream after its pending update.
    Update,
    /// The norm of the stream after a product was added to it.
    Product,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Then {
    /// [`Backend::join`]
    Join,
    /// [`Backend::linears`] with gate and up.
    Products,
    Gated,
    Mlp {
        adds_to_stream: bool,
    },
    Experts,
}

#[derive(Debug, Clone, Copy)]
struct Operation {
    source: Source,
    then: Then,
}

/// Tensors that an operation reads and writes.
struct Tensors {
    residual: Residual,
    normed: Tensor,
    /// Rows that a product takes to the stream.
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    router_logits: Tensor,
}

impl Tensors {
    fn new(harness: &Harness<'_>, layer: &Layer, num_rows: usize) -> Tensors {
        let [hidden, width] = layer.widths;
        let zeros = |cols| harness.zeros(num_rows, cols);
        Tensors {
            residual: Residual { hidden: zeros(hidden), update: zeros(hidden), pending: Pending::Nothing },
            normed: zeros(hidden),
            x: zeros(width),
            gate: zeros(width),
            up: zeros(width),
            router_logits: zeros(NUM_EXPERTS),
        }
    }

    /// The tensors that an operation may read.
    fn inputs(&mut self) -> [&mut Tensor; 4] {
        [&mut self.residual.hidden, &mut self.residual.update, &mut self.normed, &mut self.x]
    }

    /// Reads the bits of every tensor whose contents the operation specifies.
    fn read(&self, harness: &Harness<'_>, then: Then) -> Vec<Vec<u32>> {
        let Tensors { residual: Residual { hidden, update, .. }, normed, gate, up, .. } = self;
        let specified: &[&Tensor] = match then {
            Then::Join | Then::Mlp { adds_to_stream: true } | Then::Experts => &[hidden],
            Then::Products => &[hidden, normed, gate, up],
            Then::Gated => &[hidden, normed, gate],
            Then::Mlp { adds_to_stream: false } => &[hidden, update],
        };
        specified.iter().map(|tensor| harness.read(tensor).into_iter().map(f32::to_bits).collect()).collect()
    }
}

/// The weights of a layer behind its attention.
struct Layer {
    formats: [DType; 2],
    /// Columns of the stream and of the MLP.
    widths: [usize; 2],
    norm: Tensor,
    /// `down` is also the product that is added to the stream before a norm.
    mlp: GatedMlp,
    router: Linear,
    experts: Vec<GatedMlp>,
    /// Values of [`Tensors::inputs`] for the maximum number of rows: two sets.
    inputs: [[Vec<f32>; 4]; 2],
}

impl Layer {
    fn new(harness: &mut Harness<'_>, formats: [DType; 2], widths: [usize; 2], num_experts: usize) -> Layer {
        let [hidden, width] = widths;
        let [first, second] = formats;
        let mut linear = |dtype: DType, rows: usize, cols: usize| {
            let bias = harness.random.normals(rows);
            let bias = (dtype != DType::Q8_0).then(|| harness.vector(&bias));
            Linear { bias, ..harness.linear(dtype, rows, cols).0 }
        };
        let router = linear(DType::F32, NUM_EXPERTS, hidden);
        let mut mlps = (0..=num_experts).map(|_| GatedMlp {
            gate: linear(first, width, hidden),
            up: linear(second, width, hidden),
            down: linear(first, hidden, width),
        });
        let (mlp, experts) = (mlps.next().expect("at least one"), mlps.collect());
        let norm = harness.random.normals(hidden);
        let max_rows = NUM_ROWS.into_iter().max().expect("a number of rows");
        let inputs =
            [(); 2].map(|()| [hidden, hidden, hidden, width].map(|cols| harness.random.normals(max_rows * cols)));
        Layer { formats, widths, norm: harness.vector(&norm), mlp, router, experts, inputs }
    }

    /// Compares an operation with its parts. Consecutive runs differ in their inputs, so that results left from an
    /// earlier run do not pass.
    fn check(&self, harness: &Harness<'_>, operation: Operation, num_rows: usize) {
        let backend = harness.backend;
        let write = |run: usize, tensors: &mut Tensors| {
            for (values, tensor) in self.inputs[run % 2].iter().zip(tensors.inputs()) {
                backend.write(&values[..tensor.len()], tensor).expect("a write");
            }
        };
        let expected = [0, 1].map(|run| {
            let mut tensors = Tensors::new(harness, self, num_rows);
            write(run, &mut tensors);
            self.run_parts(backend, operation, &mut tensors).expect("separate operations");
            let expected = tensors.read(harness, operation.then);
            let is_finite = expected.iter().flatten().all(|&bits| f32::from_bits(bits).is_finite());
            assert!(is_finite, "{:?}, {num_rows} rows: parts of {operation:?} are not finite", self.formats);
            expected
        });
        let rows = StepTables::new(num_rows);
        let mut memo = StepMemo::default();
        let mut tensors = Tensors::new(harness, self, num_rows);
        let num_steps = if backend.is_asynchronous() { NUM_STEPS } else { 1 };
        for run in 0..=num_steps {
            write(run, &mut tensors);
            let mut fused = || self.run_fused(backend, operation, &mut tensors);
            let result = if run == 0 { fused() } else { backend.step(&rows.index(), &mut memo, &mut fused) };
            result.expect("fused operations");
            let place = if run == 0 { "outside of a step".to_owned() } else { format!("in step {run}") };
            assert!(
                tensors.read(harness, operation.then) == expected[run % 2],
                "{:?}, {:?} columns, {num_rows} rows, {place}: {operation:?} differs from its parts",
                self.formats,
                self.widths
            );
        }
    }

    fn run_fused(&self, backend: &dyn Backend, operation: Operation, tensors: &mut Tensors) -> Result<(), Error> {
        let Tensors { residual, normed, x, gate, up, router_logits } = tensors;
        let Operation { source, then } = operation;
        let (weight, eps) = (&self.norm, EPS);
        residual.pending = if source == Source::Update { Pending::Update } else { Pending::Nothing };
        if source == Source::Product {
            backend.linear_to(x, &self.mlp.down, Output::Residual(residual))?;
        }
        if let Then::Mlp { adds_to_stream } = then {
            let norm = (source != Source::Rows).then_some(RmsNorm { weight, eps });
            let (mlp, activation) = (&self.mlp, ACTIVATION);
            let call = GatedMlpCall { mlp, activation, norm, normed, gate, up, adds_to_stream };
            backend.gated_mlp(call, residual)?;
            return backend.join(residual);
        }
        if then == Then::Join {
            return backend.join(residual);
        }
        let input = match source {
            Source::Rows => Input::Rows(normed),
            Source::Normed => Input::Normed { x: &residual.hidden, weight, eps, normed: &mut *normed },
            Source::Stream | Source::Update | Source::Product => {
                Input::Joined { residual: &mut *residual, weight, eps, normed: &mut *normed }
            }
        };
        let mut maps = [(&self.mlp.gate, gate), (&self.mlp.up, up)];
        match then {
            Then::Gated => backend.gated(input, maps, ACTIVATION),
            Then::Experts => {
                backend.input(input)?;
                backend.linear(normed, &self.router, router_logits)?;
                backend.expert_mlp(self.experts(normed, router_logits), Output::Residual(residual))?;
                backend.join(residual)
            }
            _ => backend.linears(input, &mut maps),
        }
    }

    fn run_parts(&self, backend: &dyn Backend, operation: Operation, tensors: &mut Tensors) -> Result<(), Error> {
        let Tensors { residual: Residual { hidden, update, .. }, normed, x, gate, up, router_logits } = tensors;
        let Operation { source, then } = operation;
        if source == Source::Product {
            backend.linear(x, &self.mlp.down, update)?;
        }
        if matches!(source, Source::Product | Source::Update) {
            backend.add(update, hidden)?;
        }
        if then == Then::Join {
            return Ok(());
        }
        if source != Source::Rows {
            backend.rms_norm(hidden, &self.norm, EPS, normed)?;
        }
        if then == Then::Experts {
            backend.linear(normed, &self.router, router_logits)?;
            backend.expert_mlp(self.experts(normed, router_logits), Output::Rows(update))?;
            return backend.add(update, hidden);
        }
        backend.linear(normed, &self.mlp.gate, gate)?;
        backend.linear(normed, &self.mlp.up, up)?;
        if then != Then::Products {
            backend.gate(ACTIVATION, up, gate)?;
        }
        if let Then::Mlp { adds_to_stream } = then {
            backend.linear(gate, &self.mlp.down, update)?;
            if adds_to_stream {
                backend.add(update, hidden)?;
            }
        }
        Ok(())
    }

    fn experts<'a>(&'a self, x: &'a Tensor, router_logits: &'a Tensor) -> ExpertMlp<'a> {
        let (routing, experts, activation) = (ROUTING, &self.experts, ACTIVATION);
        ExpertMlp { x, router_logits, routing, score_bias: None, expert_scales: None, experts, activation }
    }
}

/// The tables of a step in which every row is one token of another sequence: only such steps are recorded.
struct StepTables {
    ids: Vec<TokenSource>,
    positions: Vec<u32>,
    /// One block for each row, which holds its only position.
    blocks: Vec<u32>,
    wanted: Vec<u32>,
    sequences: Vec<SequenceSpan>,
}

impl StepTables {
    fn new(num_rows: usize) -> StepTables {
        let rows: Vec<u32> = (0..num_rows as u32).collect();
        StepTables {
            ids: vec![TokenSource::Token(0); num_rows],
            positions: vec![0; num_rows],
            blocks: rows.clone(),
            wanted: rows,
            sequences: (0..num_rows).map(|row| SequenceSpan { rows: row..row + 1, blocks: row..row + 1 }).collect(),
        }
    }

    fn index(&self) -> StepIndex<'_> {
        let StepTables { ids, positions, blocks, wanted, sequences } = self;
        StepIndex {
            states: &[],
            saves: &[],
            ids,
            positions,
            slots: blocks,
            wanted,
            sequences,
            block_tables: blocks,
            window_slots: &[],
            window_tables: &[],
            previous_slots: &[],
            queries: &[],
            kv_address: 0,
        }
    }
}
