//! [`CudaBackend`]: the operations of [`Backend`], each under the lock of the GPU's state.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pellucid_tensor::{
    Activation, Attend, Attention, Backend, DType, DeltaNet, DigestTicket, Error, ExpertMlp, Extension, GatedMlpCall,
    HostFloats, HostWeight, Input, KvLayer, Linear, Mamba2, Output, PlainMlp, Residual, Rope, RotateAndStore, Routing,
    RowDigest, RowQuery, ShortConvolution, StepIndex, StepMemo, StoreKv, TableRows, Tensor, TokenSlots,
};

use crate::attention::{Extras, Stored};
use crate::cublas::CublasLt;
use crate::driver::{Device, Grid};
use crate::gpu::{Conversion, Gpu, Purpose};
use crate::kernels;
use crate::kernels::rows::elementwise::{
    self, Angles, Elementwise, Embed, GateByColumns, JoinHeads, ReadBytes, Rotation,
};
use crate::kernels::rows::norm::Norm;
use crate::memory::{DeviceMemory, copy_row, floats, floats_mut, memory, read};
use crate::pinned::Pinned;
use crate::probe::Unusable;
use crate::products::norm_of;
use crate::{digest, experts, upload};

/// A GPU as a device.
pub struct CudaBackend {
    pub(crate) device: Arc<Device>,
    has_cublas: bool,
    gpu: Mutex<Gpu>,
}

/// The GPU to open, and options of its kernels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CudaOptions {
    pub ordinal: usize,
    /// Prefer speed to batch invariance: where cuBLASLt is installed, the last bits of a row may depend on the rest of
    /// the batch.
    pub fast: bool,
    /// Compile the kernels with NVRTC although they are embedded, to test the path for GPUs that the embedded ones do
    /// not cover.
    pub compile_kernels: bool,
}

impl CudaBackend {
    /// Opens a GPU.
    pub fn open(options: CudaOptions) -> Result<CudaBackend, Unusable> {
        let device = Device::open(options.ordinal, options.compile_kernels)?;
        let failed = |error: Error| Unusable::OpenFailed { name: device.name(), reason: error.to_string() };
        let cublas = if options.fast { CublasLt::open(&device).map_err(failed)? } else { None };
        let has_cublas = cublas.is_some();
        Ok(CudaBackend { device: device.clone(), has_cublas, gpu: Mutex::new(Gpu::new(device, cublas)) })
    }

    /// Whether products may go to cuBLASLt.
    pub fn has_fast_products(&self) -> bool {
        self.has_cublas
    }

    /// Locks the state. Operations hold the lock while they launch, never while they call back into the model.
    pub(crate) fn gpu(&self) -> MutexGuard<'_, Gpu> {
        self.gpu.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        let fast = if self.has_cublas { ", fast" } else { "" };
        format!("cuda:{} ({}, compute {major}.{minor}, {gib:.0} GiB{fast})", info.ordinal, info.name)
    }

    fn remarks(&self) -> Vec<String> {
        let remark = |&Conversion { from, to, num_tensors }: &Conversion| {
            format!("{num_tensors} weights of {from} are stored as {to} on the GPU, which has no kernels for {from}")
        };
        let compiled = self.device.compiled_because.as_ref().map(|why| {
            format!("NVRTC compiled the kernels because the embedded ones did not load: {why}. They may be slower")
        });
        compiled.into_iter().chain(self.gpu().conversions.iter().map(remark)).collect()
    }

    /// The residual stream and everything beside it are f32; products round their input (see `Operand`).
    fn activation_dtype(&self) -> DType {
        DType::F32
    }

    /// Fewer rows would leave multiprocessors idle in the last wave of blocks of a product.
    fn chunk_len(&self) -> usize {
        2048
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn experts_are_asynchronous(&self, num_rows: usize, num_experts: usize, routing: Routing) -> bool {
        experts::on_device::serves(num_rows, num_experts, routing)
    }

    fn supports(&self, extension: Extension) -> bool {
        // A new extension must be decided here.
        use Extension::*;
        match extension {
            AttentionSinks | ClampedSwiglu | ExpertBiases | SigmoidRouter | ShortConvolution | ExpertScales => true,
            LayerInputs | LayerScales | DeltaNet | SigmoidGates | LatentAttention | Mamba2 => true,
            PlainExperts | SquaredRelu | WindowBlocks => true,
            SharedExperts | SharedMamba2 => false,
        }
    }

    fn free_memory(&self) -> Option<u64> {
        self.device.memory().ok().map(|(free, _)| free as u64)
    }

    fn stored_bytes(&self, dtype: DType, len: usize) -> Option<u64> {
        upload::stored_dtype(dtype).bytes_for(len).map(|bytes| bytes as u64)
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
        if dtype.is_quantized() && kernels::attention::store_kv::storage(dtype).is_none() {
            let why = format!("activations and KV memory in {dtype} have no kernel");
            return Err(self.device.refuse("allocating", why));
        }
        let len = rows.checked_mul(cols).and_then(|len| dtype.bytes_for(len));
        let len = len.ok_or_else(|| Error::OutOfMemory { device: self.device.name(), bytes: usize::MAX })?;
        let buffer = self.device.allocate_zeroed(len)?;
        Ok(Tensor::new(dtype, rows, cols, Box::new(DeviceMemory::new(buffer))))
    }

    fn resize_rows(&self, tensor: &mut Tensor, rows: usize) -> Result<(), Error> {
        let bytes = tensor.dtype().bytes_for(rows * tensor.cols()).expect("activations are not quantized");
        if memory(tensor).buffer.bytes() < bytes {
            *tensor = self.zeros(tensor.dtype(), rows, tensor.cols())?;
        }
        tensor.set_rows(rows);
        Ok(())
    }

    fn weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        upload::table(&mut self.gpu(), weight)
    }

    fn linear_weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        upload::matrix(&mut self.gpu(), weight, self.has_cublas)
    }

    /// Few rows never go to cuBLASLt.
    fn few_rows_weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        upload::matrix(&mut self.gpu(), weight, false)
    }

    fn read(&self, tensor: &Tensor, out: &mut [f32]) -> Result<(), Error> {
        if tensor.dtype() != DType::F32 {
            return Err(self.device.refuse(
                "reading",
                format!("a tensor of {} cannot be copied to the host; only F32 can", tensor.dtype()),
            ));
        }
        assert_eq!(out.len(), tensor.len());
        self.device.download(read(tensor), out)
    }

    fn read_row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) -> Result<(), Error> {
        assert!(row < tensor.rows() && out.len() == tensor.cols(), "a row of the tensor");
        self.device.download(floats(tensor) + (row * tensor.cols() * 4) as u64, out)
    }

    fn digest_len(&self, cols: usize) -> Option<usize> {
        (cols <= kernels::rows::digest::MAX_COLS).then_some(kernels::rows::digest::NUM_TOP)
    }

    fn digest(&self, logits: &Tensor, queries: &[RowQuery]) -> Result<(), Error> {
        digest::digest(&mut self.gpu(), logits, queries)
    }

    fn fetch_digests(&self, num_rows: usize) -> Result<DigestTicket, Error> {
        digest::fetch(&mut self.gpu(), num_rows)
    }

    fn read_digests(&self, ticket: DigestTicket, out: &mut [RowDigest]) -> Result<(), Error> {
        digest::read(&mut self.gpu(), ticket, out)
    }

    fn token_slots(&self) -> TokenSlots {
        elementwise::TOKEN_SLOTS
    }

    fn keep_assumed(&self, num_rows: usize, slot: usize) -> Result<(), Error> {
        digest::keep_assumed(&mut self.gpu(), num_rows, slot)
    }

    fn replace_kept(&self, slot: usize, tokens: &[u32]) -> Result<(), Error> {
        digest::replace_kept(&mut self.gpu(), slot, tokens)
    }

    fn fetch_kept(&self, num_slots: usize) -> Result<(), Error> {
        digest::fetch_kept(&mut self.gpu(), num_slots)
    }

    fn read_kept(&self, out: &mut Vec<u32>) -> Result<(), Error> {
        digest::read_kept(&mut self.gpu(), out)
    }

    fn copy_row(&self, from: usize, to: usize, tensor: &mut Tensor) -> Result<(), Error> {
        assert!(from < tensor.rows() && to < tensor.rows(), "rows of the tensor");
        copy_row(&self.device, (tensor, from), (tensor, to))
    }

    fn copy_rows(&self, from: &Tensor, rows: &[u32], to: &mut Tensor, first: usize) -> Result<(), Error> {
        assert_eq!((from.dtype(), from.cols()), (to.dtype(), to.cols()), "rows of the same form");
        assert!(first + rows.len() <= to.rows() && rows.iter().all(|&row| (row as usize) < from.rows()), "rows");
        memory(to).outdate();
        (rows.iter().enumerate())
            .try_for_each(|(i, &row)| copy_row(&self.device, (from, row as usize), (to, first + i)))
    }

    fn write(&self, values: &[f32], tensor: &mut Tensor) -> Result<(), Error> {
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

    fn wait(&self) -> Result<(), Error> {
        self.device.synchronize("a step without logits")
    }

    fn embed(&self, table: &Tensor, rows: TableRows<'_>, scale: f32, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (rows.len(), table.cols()));
        let mut gpu = self.gpu();
        let embed = Embed {
            table: read(table),
            ids: match rows {
                TableRows::Tokens(tokens) => gpu.token_index(tokens)?,
                TableRows::Positions(positions) => gpu.index(Purpose::Ids, positions)?,
            },
            assumed: digest::assumed_tokens(&mut gpu, 0)?,
            out: floats_mut(out),
            row_bytes: table.dtype().bytes_for(table.cols()).expect("rows are whole blocks") as u64,
            num_rows: rows.len() as u32,
            cols: table.cols() as u32,
            table_rows: table.rows() as u32,
            format: kernels::format(table.dtype()).expect("weights are stored in a format with a kernel"),
            scale,
        };
        embed.launch(&self.device)
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (rows.len(), x.cols()));
        self.gpu().move_rows("gather_rows", x, (rows, x.rows()), out)
    }

    fn scatter_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((x.rows(), x.cols()), (rows.len(), out.cols()));
        self.gpu().move_rows("scatter_rows", x, (rows, out.rows()), out)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error> {
        self.gpu().rms_norm(x, weight, eps, out)
    }

    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (x.rows(), x.cols()));
        assert_eq!((weight.len(), bias.len()), (x.cols(), x.cols()));
        self.gpu().norm("layer_norm", floats(x), norm_of(weight, Some(bias), eps), out)
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
        let norm = Norm { y: floats(y), ..norm_of(weight, None, eps) };
        self.gpu().norm("rms_norm", floats_mut(x), norm, out)
    }

    fn add(&self, y: &Tensor, x: &mut Tensor) -> Result<(), Error> {
        self.gpu().add(y, x)
    }

    fn soft_cap(&self, cap: f32, x: &mut Tensor) -> Result<(), Error> {
        let parameter = Elementwise { x: floats_mut(x), y: 0, len: x.len() as u64, cap, activation: 0 };
        elementwise::launch(&self.device, "soft_cap", parameter)
    }

    fn linear(&self, x: &Tensor, linear: &Linear, out: &mut Tensor) -> Result<(), Error> {
        self.gpu().linear_to(x, linear, Output::Rows(out))
    }

    fn linear_to(&self, x: &Tensor, linear: &Linear, out: Output<'_>) -> Result<(), Error> {
        self.gpu().linear_to(x, linear, out)
    }

    fn input<'a>(&self, input: Input<'a>) -> Result<&'a Tensor, Error> {
        self.gpu().input(input)
    }

    fn join(&self, residual: &mut Residual) -> Result<(), Error> {
        self.gpu().join(residual)
    }

    fn linears(&self, x: Input<'_>, maps: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error> {
        self.gpu().linears(x, maps)
    }

    fn gated(&self, x: Input<'_>, maps: [(&Linear, &mut Tensor); 2], activation: Activation) -> Result<(), Error> {
        self.gpu().gated(x, maps, activation).map(|_| ())
    }

    fn gated_mlp(&self, call: GatedMlpCall<'_>, residual: &mut Residual) -> Result<(), Error> {
        self.gpu().gated_mlp(call, residual)
    }

    fn activate(&self, activation: Activation, x: &mut Tensor) -> Result<(), Error> {
        assert_ne!(activation, Activation::ClampedSwiglu, "only gates have it");
        let activation = elementwise::activation_code(activation);
        let parameter = Elementwise { x: floats_mut(x), y: 0, len: x.len() as u64, cap: 0.0, activation };
        elementwise::launch(&self.device, "activate", parameter)
    }

    fn gate(&self, activation: Activation, up: &Tensor, gate: &mut Tensor) -> Result<(), Error> {
        self.gpu().gate(elementwise::activation_code(activation), up, gate)
    }

    fn sigmoid_gate(&self, gate: &Tensor, x: &mut Tensor) -> Result<(), Error> {
        assert_eq!(gate.rows(), x.rows());
        assert!([1, x.cols()].contains(&gate.cols()), "a gate for each value, or one for the row");
        let (len, cols, pitch) = (x.len() as u64, x.cols() as u32, gate.cols() as u32);
        let parameter = GateByColumns { x: floats_mut(x), by: floats(gate), len, cols, pitch, activation: 0 };
        parameter.launch(&self.device, "sigmoid_gate")
    }

    fn gate_by_columns(
        &self,
        activation: Activation,
        inputs: &Tensor,
        first: usize,
        gate: &mut Tensor,
    ) -> Result<(), Error> {
        assert_eq!(inputs.rows(), gate.rows());
        assert!(first + gate.cols() <= inputs.cols(), "columns of the inputs");
        let parameter = GateByColumns {
            x: floats_mut(gate),
            by: floats(inputs) + 4 * first as u64,
            len: gate.len() as u64,
            cols: gate.cols() as u32,
            pitch: inputs.cols() as u32,
            activation: elementwise::activation_code(activation),
        };
        parameter.launch(&self.device, "gate_columns")
    }

    fn scale(&self, factor: f32, x: &mut Tensor) -> Result<(), Error> {
        let parameter = Elementwise { x: floats_mut(x), y: 0, len: x.len() as u64, cap: factor, activation: 0 };
        elementwise::launch(&self.device, "scale", parameter)
    }

    fn expert_mlp(&self, mlp: ExpertMlp<'_>, out: Output<'_>) -> Result<(), Error> {
        experts::expert_mlp(&mut self.gpu(), &mlp, out)
    }

    fn plain_expert_mlp(&self, mlp: ExpertMlp<'_, PlainMlp>, out: Output<'_>) -> Result<(), Error> {
        experts::one_matrix::plain_expert_mlp(&mut self.gpu(), &mlp, out)
    }

    fn map_heads(&self, x: &Tensor, maps: &[Linear], out: &mut Tensor) -> Result<(), Error> {
        experts::one_matrix::map_heads(&mut self.gpu(), x, maps, out)
    }

    fn join_heads(&self, num_heads: usize, parts: [&Tensor; 2], out: &mut Tensor) -> Result<(), Error> {
        let rows = parts.map(Tensor::rows);
        assert_eq!((rows, out.cols()), ([out.rows(); 2], parts[0].cols() + parts[1].cols()));
        assert!(parts.iter().all(|part| part.cols().is_multiple_of(num_heads)), "whole heads");
        let cols = parts.map(|part| (part.cols() / num_heads) as u32);
        let parameter = JoinHeads { parts: parts.map(floats), out: floats_mut(out), len: out.len() as u64, cols };
        parameter.launch(&self.device)
    }

    fn rope_angles(&self, positions: &[u32], frequencies: &[f32], factor: f32, out: &mut Tensor) -> Result<(), Error> {
        assert_eq!((out.rows(), out.cols()), (positions.len(), 2 * frequencies.len()));
        let mut gpu = self.gpu();
        let angles = Angles {
            positions: gpu.index(Purpose::Positions, positions)?,
            frequencies: gpu.frequencies(frequencies)?,
            out: floats_mut(out),
            num_rows: positions.len() as u32,
            pairs: frequencies.len() as u32,
            factor,
        };
        self.device.launch("rope_angles", Grid::items(positions.len() * frequencies.len(), 128), &angles)
    }

    fn rope(&self, rope: Rope<'_>, x: &mut Tensor) -> Result<(), Error> {
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
            interleaved: elementwise::style_code(rope.style),
        };
        self.device.launch("rope", Grid::items(x.rows() * (x.cols() / rope.head_size) * pairs, 256), &rotation)
    }

    fn store_kv(&self, store: StoreKv<'_>, kv: &mut KvLayer) -> Result<(), Error> {
        let StoreKv { keys, values, slots, shape } = store;
        self.gpu().store_kv(keys, Stored { values: Some(values), slots, shape }, kv)
    }

    fn rotate_and_store(
        &self,
        call: RotateAndStore<'_>,
        queries: &mut Tensor,
        keys: &mut Tensor,
        kv: &mut KvLayer,
    ) -> Result<(), Error> {
        let RotateAndStore { rope, values, slots, shape } = call;
        self.gpu().rotate_and_store(rope, Stored { values: Some(values), slots, shape }, [queries, keys], kv)
    }

    fn attention(&self, attention: Attention<'_>, out: &mut Tensor) -> Result<(), Error> {
        self.gpu().attention(attention, Extras::default(), out)
    }

    fn attend(
        &self,
        call: Attend<'_>,
        queries: &mut Tensor,
        keys: &mut Tensor,
        kv: &mut KvLayer,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        self.gpu().attend(call, queries, keys, kv, out)
    }

    fn short_convolution(
        &self,
        call: ShortConvolution<'_>,
        memory: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        self.gpu().short_convolution(&call, memory, out)
    }

    fn delta_net(&self, call: DeltaNet<'_>, memory: &mut Tensor, out: &mut Tensor) -> Result<(), Error> {
        self.gpu().delta_net(&call, memory, out)
    }

    fn mamba2(&self, call: Mamba2<'_>, memory: &mut Tensor, out: &mut Tensor) -> Result<(), Error> {
        self.gpu().mamba2(&call, memory, out)
    }
}
