//! [`CudaBackend`]: finds the addresses behind tensors and launches the kernels.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pellucid_tensor::{
    Activation, Attention, Backend, DType, DigestTicket, Error, ExpertMlp, HostFloats, HostWeight, Input, KvLayer,
    Linear, Rope, Routing, RowDigest, RowQuery, StepIndex, StepMemo, StoreKv, Tensor, TurnAndStore,
};

use crate::cublas::CublasLt;
use crate::digest;
use crate::driver::{Buffer, Device, Grid};
use crate::fuse::Fusion;
use crate::kernels::linear::SliceSums;
use crate::kernels::norm::{self, Norm};
use crate::kernels::rows::{self, Angles, Elementwise, Embed, GateRows, Gather, ReadBytes, Rotation};
use crate::kernels::{self, Operand};
use crate::memory::{DeviceMemory, floats, floats_mut, memory, read};
use crate::pinned::{Pinned, Ring};
use crate::probe::Unusable;
use crate::step::Current;
use crate::{attention, expert_steps, experts, products, upload};

/// A GPU as a device.
pub struct CudaBackend {
    pub(crate) device: Arc<Device>,
    pub(crate) current: Mutex<Current>,
    pub(crate) fusion: Mutex<Fusion>,
    scratch: Mutex<Vec<Option<Buffer>>>,
    pub(crate) counters: Mutex<Option<Buffer>>,
    frequencies: Mutex<Vec<(Vec<u32>, Buffer)>>,
    conversions: Mutex<Vec<Conversion>>,
    /// Where the tables of a step are put together.
    pub(crate) step_tables: Mutex<Ring<u32>>,
    /// What weights pass through on their way to the device.
    pub(crate) staging: Mutex<upload::Staging>,
    pub(crate) expert_tables: Mutex<expert_steps::Tables>,
    pub(crate) arrivals: Mutex<digest::Arrivals>,
    /// For products whose bits may depend on the number of rows, where the user asked for speed above all.
    pub(crate) cublas: Option<CublasLt>,
}

/// Which GPU, and how it is to be used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CudaOptions {
    pub ordinal: usize,
    /// Speed above all: where cuBLASLt is installed, a row's last bits may depend on its company.
    pub fast: bool,
    /// Compile the kernels with NVRTC although they are embedded, to see that it works where they are not.
    pub compile_kernels: bool,
}

/// Weights that were stored in another format than their file's, because there is no kernel for that one.
#[derive(Debug, Clone, Copy)]
struct Conversion {
    from: DType,
    to: DType,
    num_tensors: usize,
}

/// What a piece of scratch memory is for. Each has one buffer, which grows and is used again in the order of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Index,
    Ids,
    Positions,
    Slots,
    RowTables,
    BlockTables,
    Slices,
    Partial,
    Upload,
    RoutedExperts,
    ExpertRows,
    ExpertInput,
    ExpertGate,
    ExpertUp,
    ExpertDown,
    ExpertOperand,
    ExpertScales,
    ExpertItems,
    RoundedRows,
    FastScalars,
    ExpandedKeys,
    ExpandedValues,
    ExpandedTables,
    DigestQueries,
    DigestMaxima,
    DigestSums,
    DigestTimes,
    DigestRows,
    Chosen,
}

impl CudaBackend {
    /// Opens a GPU.
    pub fn open(options: CudaOptions) -> Result<CudaBackend, Unusable> {
        let device = Device::open(options.ordinal, options.compile_kernels)?;
        let failed = |error: Error| Unusable::OpenFailed { name: device.name(), reason: error.to_string() };
        let cublas = if options.fast { CublasLt::open(&device).map_err(failed)? } else { None };
        Ok(CudaBackend {
            device,
            current: Mutex::default(),
            fusion: Mutex::default(),
            scratch: Mutex::default(),
            counters: Mutex::default(),
            frequencies: Mutex::default(),
            conversions: Mutex::default(),
            step_tables: Mutex::default(),
            staging: Mutex::default(),
            expert_tables: Mutex::default(),
            arrivals: Mutex::default(),
            cublas,
        })
    }

    /// Whether products may go to cuBLASLt.
    pub fn has_fast_products(&self) -> bool {
        self.cublas.is_some()
    }

    pub(crate) fn note_conversion(&self, from: DType, to: DType) {
        let mut conversions = lock(&self.conversions);
        match conversions.iter_mut().find(|conversion| (conversion.from, conversion.to) == (from, to)) {
            Some(conversion) => conversion.num_tensors += 1,
            None => conversions.push(Conversion { from, to, num_tensors: 1 }),
        }
    }

    /// Address of at least `bytes` bytes for one purpose.
    pub(crate) fn scratch(&self, purpose: Purpose, bytes: usize) -> Result<u64, Error> {
        let mut scratch = lock(&self.scratch);
        let i = purpose as usize;
        if scratch.len() <= i {
            scratch.resize_with(i + 1, || None);
        }
        if scratch[i].as_ref().is_none_or(|buffer| buffer.bytes() < bytes) {
            scratch[i] = None;
            scratch[i] = Some(self.device.allocate(bytes)?);
        }
        Ok(scratch[i].as_ref().expect("made above").address())
    }

    /// The device's copy of a slice: the step's own, or one made now.
    pub(crate) fn index(&self, purpose: Purpose, slice: &[u32]) -> Result<u64, Error> {
        let current = lock(&self.current);
        if let Some(address) = current.find(slice) {
            return Ok(address);
        }
        self.refuse_while_recording(&current)?;
        let address = self.scratch(purpose, slice.len() * 4)?;
        self.device.upload(slice, address)?;
        Ok(address)
    }

    /// What needs the host cannot be part of a recording; `step` then runs the operations one by one.
    pub(crate) fn refuse_while_recording(&self, current: &Current) -> Result<(), Error> {
        match current.is_recording {
            true => Err(self.device.refuse("recording a step", "an operation needs the host")),
            false => Ok(()),
        }
    }

    pub(crate) fn host_is_needed(&self) -> Result<(), Error> {
        self.refuse_while_recording(&lock(&self.current))
    }

    /// Frequencies on the device; the few tables of a model are kept.
    fn frequencies(&self, frequencies: &[f32]) -> Result<u64, Error> {
        let bits: Vec<u32> = frequencies.iter().map(|frequency| frequency.to_bits()).collect();
        let mut known = lock(&self.frequencies);
        if let Some((_, buffer)) = known.iter().find(|(table, _)| *table == bits) {
            return Ok(buffer.address());
        }
        let buffer = self.device.allocate(bits.len() * 4)?;
        self.device.upload(&bits, buffer.address())?;
        let address = buffer.address();
        known.push((bits, buffer));
        Ok(address)
    }

    /// RMSNorm; of a row or two it waits for the products that read it.
    fn rms_norm_of(&self, x: u64, norm: Norm, out: &mut Tensor) -> Result<(), Error> {
        let is_whole = norm.width as usize == out.cols();
        if is_whole && self.norm_waits(Norm { x, out: floats_mut(out), ..norm }, out.rows()) {
            return Ok(());
        }
        self.norm("rms_norm", x, norm, out)
    }

    /// `norm` has everything but the places of what is read and written.
    fn norm(&self, kernel: &'static str, x: u64, norm: Norm, out: &mut Tensor) -> Result<(), Error> {
        assert!(out.cols().is_multiple_of(norm.width as usize));
        let mut norm = Norm { x, out: floats_mut(out), ..norm };
        if norm.width as usize == out.cols()
            && let Some(operand) = memory(out).operand_to_write(out.rows())
        {
            norm.with_operand = 1;
            norm.operand = operand;
        }
        norm::norm(&self.device, kernel, out.len() / norm.width as usize, &norm)
    }
}

fn norm_of(weight: &Tensor, bias: Option<&Tensor>, eps: f32) -> Norm {
    Norm {
        x: 0,
        y: 0,
        slices: SliceSums::NONE,
        weight: floats(weight),
        bias: bias.map_or(0, floats),
        out: 0,
        width: weight.len() as u32,
        eps,
        with_operand: 0,
        operand: Operand::NONE,
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.description())
    }
}

impl Backend for CudaBackend {
    fn description(&self) -> String {
        let info = &self.device.info;
        let gib = info.total_bytes as f64 / (1u64 << 30) as f64;
        let (major, minor) = info.capability;
        let fast = if self.cublas.is_some() { ", fast" } else { "" };
        format!("cuda:{} ({}, compute {major}.{minor}, {gib:.0} GiB{fast})", info.ordinal, info.name)
    }

    fn remarks(&self) -> Vec<String> {
        let remark = |&Conversion { from, to, num_tensors }: &Conversion| {
            format!(
                "{num_tensors} weights of {from} are kept as {to} on the GPU, which has no kernels for them as they are"
            )
        };
        let compiled = self.device.compiled_because.as_ref().map(|why| {
            format!("NVRTC compiled the kernels, since those of the program did not load: {why}. They may be slower")
        });
        compiled.into_iter().chain(lock(&self.conversions).iter().map(remark)).collect()
    }

    /// The residual stream and everything beside it are f32; products round their input by themselves (see `Operand`).
    fn activation_dtype(&self) -> DType {
        DType::F32
    }

    /// Fewer rows would leave multiprocessors idle in the last round of a product.
    fn chunk_len(&self) -> usize {
        2048
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn experts_run_ahead(&self, num_rows: usize, num_experts: usize, routing: Routing) -> bool {
        expert_steps::serves(num_rows, num_experts, routing)
    }

    fn free_memory(&self) -> Option<u64> {
        self.device.memory().ok().map(|(free, _)| free as u64)
    }

    fn read_bandwidth(&self, size: usize) -> Result<f64, Error> {
        const ROUNDS: u32 = 5;
        let buffer = self.device.allocate_zeroed(size.max(1 << 20))?;
        let from = buffer.address();
        let parameter = ReadBytes { from, len: buffer.bytes() as u64 / 16, sink: from };
        let grid = Grid::linear(self.device.num_multiprocessors() * 8, 256);
        self.device.launch("read_bytes", grid, &parameter)?;
        self.device.synchronize("read_bytes")?;
        let start = Instant::now();
        for _ in 0..ROUNDS {
            self.device.launch("read_bytes", grid, &parameter)?;
        }
        self.device.synchronize("read_bytes")?;
        Ok(buffer.bytes() as f64 * f64::from(ROUNDS) / start.elapsed().as_secs_f64())
    }

    fn host_floats(&self, len: usize) -> Result<Box<dyn HostFloats>, Error> {
        Ok(Box::new(Pinned::new(&self.device, len)?))
    }

    fn zeros(&self, dtype: DType, rows: usize, cols: usize) -> Result<Tensor, Error> {
        if dtype.is_quantized() && kernels::store::storage(dtype).is_none() {
            let why = format!("activations and KV memory in {dtype} have no kernel");
            return Err(self.device.refuse("allocating", why));
        }
        let len = rows.checked_mul(cols).and_then(|len| dtype.bytes_for(len));
        let len = len.ok_or_else(|| Error::OutOfMemory { device: self.device.name(), bytes: usize::MAX })?;
        let buffer = self.device.allocate_zeroed(len)?;
        Ok(Tensor::new(dtype, rows, cols, Box::new(DeviceMemory::new(buffer))))
    }

    fn resize_rows(&self, tensor: &mut Tensor, rows: usize) -> Result<(), Error> {
        let bytes = tensor.dtype().bytes_for(rows * tensor.cols()).expect("activations are whole numbers");
        if memory(tensor).buffer.bytes() < bytes {
            *tensor = self.zeros(tensor.dtype(), rows, tensor.cols())?;
        }
        tensor.set_rows(rows);
        Ok(())
    }

    fn weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        upload::table(self, weight)
    }

    fn linear_weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        upload::matrix(self, weight, self.has_fast_products())
    }

    /// Few rows never go to cuBLASLt.
    fn few_rows_weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        upload::matrix(self, weight, false)
    }

    fn read(&self, tensor: &Tensor, out: &mut [f32]) -> Result<(), Error> {
        self.settle()?;
        if tensor.dtype() != DType::F32 {
            return Err(self.device.refuse("reading", format!("a tensor of {} is not brought back", tensor.dtype())));
        }
        assert_eq!(out.len(), tensor.len());
        self.device.download(read(tensor), out)
    }

    fn read_row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) -> Result<(), Error> {
        self.settle()?;
        assert!(row < tensor.rows() && out.len() == tensor.cols(), "a row of the tensor");
        self.device.download(floats(tensor) + (row * tensor.cols() * 4) as u64, out)
    }

    fn digest_len(&self, cols: usize) -> Option<usize> {
        (cols <= kernels::digest::MAX_COLS).then_some(kernels::digest::NUM_TOP)
    }

    fn digest(&self, logits: &Tensor, queries: &[RowQuery]) -> Result<(), Error> {
        self.settle()?;
        digest::digest(self, logits, queries)
    }

    fn fetch_digests(&self, num_rows: usize) -> Result<DigestTicket, Error> {
        digest::fetch(self, num_rows)
    }

    fn read_digests(&self, ticket: DigestTicket, out: &mut [RowDigest]) -> Result<(), Error> {
        digest::read(self, ticket, out)
    }

    fn copy_row(&self, from: usize, to: usize, tensor: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        assert!(from < tensor.rows() && to < tensor.rows(), "rows of the tensor");
        let bytes = tensor.dtype().bytes_for(tensor.cols()).expect("rows are whole numbers");
        // In 8 bits a row is in two places: its bytes, and after those of all rows its scales.
        let (first, second) =
            if tensor.dtype() == DType::Q8_0 { (tensor.cols(), bytes - tensor.cols()) } else { (bytes, 0) };
        let base = read(tensor);
        self.device.copy(base + (from * first) as u64, base + (to * first) as u64, first)?;
        if second == 0 {
            return Ok(());
        }
        let scales = base + tensor.len() as u64;
        self.device.copy(scales + (from * second) as u64, scales + (to * second) as u64, second)
    }

    fn write(&self, values: &[f32], tensor: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        assert_eq!(values.len(), tensor.len());
        self.device.upload(values, floats_mut(tensor))
    }

    fn step(
        &self,
        index: &StepIndex<'_>,
        memo: &mut StepMemo,
        run: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.run_step(index, memo, run)
    }

    fn embed(&self, table: &Tensor, ids: &[u32], scale: f32, out: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        assert_eq!((out.rows(), out.cols()), (ids.len(), table.cols()));
        let embed = Embed {
            table: read(table),
            ids: self.index(Purpose::Ids, ids)?,
            chosen: digest::chosen(self, 0)?,
            out: floats_mut(out),
            row_bytes: table.dtype().bytes_for(table.cols()).expect("rows are whole blocks") as u64,
            num_rows: ids.len() as u32,
            cols: table.cols() as u32,
            table_rows: table.rows() as u32,
            format: kernels::format(table.dtype()).expect("weights are stored in a format with a kernel"),
            scale,
        };
        embed.launch(&self.device)
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        assert_eq!((out.rows(), out.cols()), (rows.len(), x.cols()));
        assert!(rows.iter().all(|&row| (row as usize) < x.rows()), "rows of x");
        let cols = x.cols() as u32;
        let gather = Gather { x: floats(x), rows: self.index(Purpose::Ids, rows)?, out: floats_mut(out), cols };
        self.device.launch("gather_rows", Grid::linear(rows.len() as u32, rows::row_threads(x.cols())), &gather)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (x.rows(), x.cols()));
        self.settle()?;
        self.rms_norm_of(floats(x), norm_of(weight, None, eps), out)
    }

    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        assert_eq!((out.rows(), out.cols()), (x.rows(), x.cols()));
        assert_eq!((weight.len(), bias.len()), (x.cols(), x.cols()));
        self.norm("layer_norm", floats(x), norm_of(weight, Some(bias), eps), out)
    }

    fn add_rms_norm(
        &self,
        y: &Tensor,
        x: &mut Tensor,
        weight: &Tensor,
        eps: f32,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        assert_eq!((x.rows(), x.cols()), (y.rows(), y.cols()));
        assert_eq!((x.rows(), x.cols()), (out.rows(), out.cols()));
        let y = floats(y);
        if let Some(slices) = self.slices_join(y) {
            return self.norm("rms_norm", floats_mut(x), Norm { slices, ..norm_of(weight, None, eps) }, out);
        }
        if self.sum_joins(y, floats_mut(x))? {
            return self.rms_norm_of(floats(x), norm_of(weight, None, eps), out);
        }
        self.rms_norm_of(floats_mut(x), Norm { y, ..norm_of(weight, None, eps) }, out)
    }

    fn add(&self, y: &Tensor, x: &mut Tensor) -> Result<(), Error> {
        assert_eq!((x.rows(), x.cols()), (y.rows(), y.cols()));
        let parameter = Elementwise { x: floats_mut(x), y: floats(y), len: x.len() as u64, cap: 0.0, activation: 0 };
        if self.sum_joins(parameter.y, parameter.x)? {
            return Ok(());
        }
        rows::elementwise(&self.device, "add", parameter)
    }

    fn soft_cap(&self, cap: f32, x: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        let parameter = Elementwise { x: floats_mut(x), y: 0, len: x.len() as u64, cap, activation: 0 };
        rows::elementwise(&self.device, "soft_cap", parameter)
    }

    fn linear(&self, x: &Tensor, linear: &Linear, out: &mut Tensor) -> Result<(), Error> {
        products::products(self, x, &mut [(linear, out)])
    }

    fn linears(&self, x: Input<'_>, maps: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error> {
        let x = self.input(x)?;
        products::products(self, x, maps)
    }

    fn activate(&self, activation: Activation, x: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        let activation = rows::activation_code(activation);
        let parameter = Elementwise { x: floats_mut(x), y: 0, len: x.len() as u64, cap: 0.0, activation };
        rows::elementwise(&self.device, "activate", parameter)
    }

    fn gate(&self, activation: Activation, up: &Tensor, gate: &mut Tensor) -> Result<(), Error> {
        assert_eq!((gate.rows(), gate.cols()), (up.rows(), up.cols()));
        let activation = rows::activation_code(activation);
        let (x, y, cols) = (floats_mut(gate), floats(up), gate.cols());
        if self.gate_joins(activation, y, x)? {
            return Ok(());
        }
        let operand = if rows::has_pieces(cols) { memory(gate).operand_to_write(gate.rows()) } else { None };
        if self.pair_joins(activation, y, x, operand)? {
            return Ok(());
        }
        match operand {
            Some(operand) => {
                let parameter = GateRows { x, y, cols: cols as u32, activation, operand };
                rows::gate(&self.device, gate.rows(), &parameter)
            }
            None => {
                let parameter = Elementwise { x, y, len: gate.len() as u64, cap: 0.0, activation };
                rows::elementwise(&self.device, "gate", parameter)
            }
        }
    }

    fn expert_mlp(&self, mlp: ExpertMlp<'_>, out: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        experts::expert_mlp(self, mlp, out)
    }

    fn rope_angles(&self, positions: &[u32], frequencies: &[f32], factor: f32, out: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        assert_eq!((out.rows(), out.cols()), (positions.len(), 2 * frequencies.len()));
        let angles = Angles {
            positions: self.index(Purpose::Positions, positions)?,
            frequencies: self.frequencies(frequencies)?,
            out: floats_mut(out),
            num_rows: positions.len() as u32,
            pairs: frequencies.len() as u32,
            factor,
        };
        self.device.launch("rope_angles", Grid::items(positions.len() * frequencies.len(), 128), &angles)
    }

    fn rope(&self, rope: Rope<'_>, x: &mut Tensor) -> Result<(), Error> {
        self.settle()?;
        assert_eq!(rope.angles.rows(), x.rows());
        assert!(rope.angles.cols() <= rope.head_size && x.cols().is_multiple_of(rope.head_size));
        let pairs = rope.angles.cols() / 2;
        let rotation = Rotation {
            angles: floats(rope.angles),
            x: floats_mut(x),
            num_rows: x.rows() as u32,
            cols: x.cols() as u32,
            head_size: rope.head_size as u32,
            pairs: pairs as u32,
            interleaved: rows::style_code(rope.style),
        };
        self.device.launch("rope", Grid::items(x.rows() * (x.cols() / rope.head_size) * pairs, 256), &rotation)
    }

    fn store_kv(&self, store: StoreKv<'_>, kv: &mut KvLayer) -> Result<(), Error> {
        self.settle()?;
        attention::store(self, &store, kv)
    }

    fn turn_and_store(
        &self,
        turn: TurnAndStore<'_>,
        queries: &mut Tensor,
        keys: &mut Tensor,
        kv: &mut KvLayer,
    ) -> Result<(), Error> {
        self.settle()?;
        attention::turn_and_store(self, turn, queries, keys, kv)
    }

    fn attention(&self, attention: Attention<'_>, out: &mut Tensor) -> Result<(), Error> {
        attention::attend(self, attention, out)
    }
}
