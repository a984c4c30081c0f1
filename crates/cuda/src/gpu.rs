//! [`Gpu`]: the part of a backend that changes while it is used, behind its one lock.

use std::sync::Arc;

use pellucid_tensor::{DType, Error, Tensor, TokenSource};

use crate::cublas::CublasLt;
use crate::digest::{Arrivals, AssumedTokens};
use crate::driver::{Buffer, Device};
use crate::experts::on_device;
use crate::kernels::rows::elementwise::{self, MovedRows};
use crate::memory::{floats, floats_mut};
use crate::pinned::Ring;
use crate::products::RowMaxima;
use crate::step::Current;
use crate::upload::Staging;

/// An opened GPU with the memory that its operations work in. One thread runs a model, so one lock serves.
pub(crate) struct Gpu {
    pub(crate) device: Arc<Device>,
    pub(crate) current: Current,
    pub(crate) row_maxima: RowMaxima,
    scratch: Vec<Option<Buffer>>,
    counters: Option<Buffer>,
    frequencies: Vec<(Vec<u32>, Buffer)>,
    pub(crate) conversions: Vec<Conversion>,
    /// Host memory in which the tables of a step are put together. The pieces suffice for the steps of the longest
    /// draft, the step that verifies it, and one more, so that none of them waits for another to end.
    pub(crate) step_tables: Ring<u32, 18>,
    /// Host memory through which weights are sent to the device.
    pub(crate) staging: Staging,
    pub(crate) expert_tables: on_device::Tables,
    pub(crate) arrivals: Arrivals,
    pub(crate) assumed: AssumedTokens,
    /// Present under `--fast`: the bits of its products may depend on the number of rows.
    pub(crate) cublas: Option<CublasLt>,
}

/// Weights that are converted to another format, because there is no kernel for the format of their file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conversion {
    pub(crate) from: DType,
    pub(crate) to: DType,
    pub(crate) num_tensors: usize,
}

/// Purpose of a piece of scratch memory. Each has one buffer, which grows and is reused in the order of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Index,
    Ids,
    Positions,
    Slots,
    RowTables,
    StateTables,
    Convolved,
    HeadFactors,
    BlockTables,
    Slices,
    Partial,
    Upload,
    RoutedExperts,
    ExpertRows,
    ExpertInput,
    ExpertInputScales,
    ExpertMaxima,
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
    AssumedTokens,
}

impl Gpu {
    pub(crate) fn new(device: Arc<Device>, cublas: Option<CublasLt>) -> Gpu {
        Gpu {
            device,
            current: Current::default(),
            row_maxima: RowMaxima::default(),
            scratch: Vec::new(),
            counters: None,
            frequencies: Vec::new(),
            conversions: Vec::new(),
            step_tables: Ring::default(),
            staging: Staging::new(),
            expert_tables: on_device::Tables::new(),
            arrivals: Arrivals::default(),
            assumed: AssumedTokens::default(),
            cublas,
        }
    }

    pub(crate) fn note_conversion(&mut self, from: DType, to: DType) {
        match self.conversions.iter_mut().find(|conversion| (conversion.from, conversion.to) == (from, to)) {
            Some(conversion) => conversion.num_tensors += 1,
            None => self.conversions.push(Conversion { from, to, num_tensors: 1 }),
        }
    }

    /// Address of at least `bytes` bytes for one purpose.
    pub(crate) fn scratch(&mut self, purpose: Purpose, bytes: usize) -> Result<u64, Error> {
        let i = purpose as usize;
        if self.scratch.len() <= i {
            self.scratch.resize_with(i + 1, || None);
        }
        if self.scratch[i].as_ref().is_none_or(|buffer| buffer.bytes() < bytes) {
            self.scratch[i] = None;
            self.scratch[i] = Some(self.device.allocate(bytes)?);
        }
        Ok(self.scratch[i].as_ref().expect("made above").address())
    }

    /// The device's copy of a slice: the step's own, or one made now.
    pub(crate) fn index(&mut self, purpose: Purpose, slice: &[u32]) -> Result<u64, Error> {
        match self.current.find(slice) {
            Some(address) => Ok(address),
            None => self.upload_index_table(purpose, slice),
        }
    }

    /// Launches a kernel that copies rows of x to rows of `out`. `rows` are numbers, below `num_rows`, of the ones or
    /// of the others.
    pub(crate) fn move_rows(
        &mut self,
        kernel: &'static str,
        x: &Tensor,
        (rows, num_rows): (&[u32], usize),
        out: &mut Tensor,
    ) -> Result<(), Error> {
        assert!(rows.iter().all(|&row| (row as usize) < num_rows), "rows of the tensor");
        let rows_address = self.index(Purpose::Ids, rows)?;
        let moved = MovedRows { x: floats(x), rows: rows_address, out: floats_mut(out), cols: x.cols() as u32 };
        moved.launch(&self.device, kernel, rows.len())
    }

    /// The device's copy of the tokens of rows: the step's own, or one made now.
    pub(crate) fn token_index(&mut self, ids: &[TokenSource]) -> Result<u64, Error> {
        match self.current.find_ids(ids) {
            Some(address) => Ok(address),
            None => {
                let codes: Vec<u32> = ids.iter().map(|&id| elementwise::token_code(id)).collect();
                self.upload_index_table(Purpose::Ids, &codes)
            }
        }
    }

    fn upload_index_table(&mut self, purpose: Purpose, words: &[u32]) -> Result<u64, Error> {
        self.refuse_while_recording()?;
        let address = self.scratch(purpose, words.len() * 4)?;
        self.device.upload(words, address)?;
        Ok(address)
    }

    /// Fails while a step is recorded: an operation that needs the host cannot be part of a recording. The step then
    /// runs without one.
    pub(crate) fn refuse_while_recording(&self) -> Result<(), Error> {
        match self.current.is_recording {
            true => Err(self.device.refuse("recording a step", "an operation needs the host")),
            false => Ok(()),
        }
    }

    /// RoPE frequencies on the device. The few tables of a model are kept.
    pub(crate) fn frequencies(&mut self, frequencies: &[f32]) -> Result<u64, Error> {
        let bits: Vec<u32> = frequencies.iter().map(|frequency| frequency.to_bits()).collect();
        if let Some((_, buffer)) = self.frequencies.iter().find(|(table, _)| *table == bits) {
            return Ok(buffer.address());
        }
        let buffer = self.device.allocate(bits.len() * 4)?;
        self.device.upload(&bits, buffer.address())?;
        let address = buffer.address();
        self.frequencies.push((bits, buffer));
        Ok(address)
    }

    /// Address of `len` counters, all zero, with which the blocks of a launch find out which of them ends last. Every
    /// launch resets them to zero.
    pub(crate) fn counters(&mut self, len: usize) -> Result<u64, Error> {
        if self.counters.as_ref().is_none_or(|buffer| buffer.bytes() < 4 * len) {
            self.counters = None;
            self.counters = Some(self.device.allocate_zeroed(4 * len.next_power_of_two())?);
        }
        Ok(self.counters.as_ref().expect("made above").address())
    }
}
