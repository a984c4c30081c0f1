//! Attention and the memory of keys and values: chooses kernels and fills in their parameters.

use pellucid_tensor::{Attend, Attention, DType, Error, HeadShape, KvLayer, Rope, Tensor, Values};

use crate::gpu::{Gpu, Purpose};
use crate::kernels::attention::decode;
use crate::kernels::attention::prefill::{self, AttentionParameter, Kernel, ValuePart, Work};
use crate::kernels::attention::store_kv::{self, ExpandParameter, RotateParameter, StoreParameter};
use crate::kernels::rows::elementwise;
use crate::memory::{floats, floats_mut, read};
use crate::step::{self, ChunkLen, RUN};

/// Maximum bytes of the results of tiles that are merged by a later kernel. One row may have more.
const MAX_PARTIAL: usize = 256 << 20;

/// Addresses of the keys and values of a step, and of its block tables.
struct KvBlocks {
    keys: u64,
    values: u64,
    tables: u64,
}

/// Rows of keys and values, and where they are stored.
#[derive(Clone, Copy)]
pub(crate) struct Stored<'a> {
    /// `None` if the values are parts of the keys.
    pub(crate) values: Option<&'a Tensor>,
    pub(crate) slots: &'a [u32],
    pub(crate) shape: HeadShape,
}

/// Parts of attention that only [`Gpu::attend`] knows.
#[derive(Default)]
pub(crate) struct Extras<'a> {
    /// A score for each head.
    sinks: Option<&'a Tensor>,
    /// Rotates and stores queries, keys and values first.
    rotate: Option<RotateParameter>,
    /// The first dimension of a stored value that is a part of the value.
    first_value: usize,
}

impl Gpu {
    /// Writes keys and values into their slots.
    pub(crate) fn store_kv(&mut self, keys: &Tensor, stored: Stored<'_>, kv: &KvLayer) -> Result<(), Error> {
        let parameter = self.store_parameter((keys, floats(keys)), stored, kv)?;
        store_kv::store(&self.device, stored.slots.len(), &parameter)
    }

    pub(crate) fn rotate_and_store(
        &mut self,
        rope: Rope<'_>,
        stored: Stored<'_>,
        [queries, keys]: [&mut Tensor; 2],
        kv: &mut KvLayer,
    ) -> Result<(), Error> {
        let (rotate, store) = self.rotate_parameters(rope, stored, [queries, keys], kv)?;
        self.launch_rotate(&rotate, store.as_ref())
    }

    fn launch_rotate(&self, rotate: &RotateParameter, store: Option<&StoreParameter>) -> Result<(), Error> {
        store_kv::rotate_and_store(&self.device, rotate)?;
        store.map_or(Ok(()), |store| store_kv::store(&self.device, rotate.num_rows as usize, store))
    }

    /// Returns the parameters of the kernel that rotates and stores. For 8 bits, also those of a second kernel that
    /// stores: values are rounded in groups, after all values of a group are rotated.
    fn rotate_parameters(
        &mut self,
        rope: Rope<'_>,
        stored: Stored<'_>,
        [queries, keys]: [&mut Tensor; 2],
        kv: &mut KvLayer,
    ) -> Result<(RotateParameter, Option<StoreParameter>), Error> {
        let Stored { slots, shape, .. } = stored;
        let pairs = rope.angles.cols() / 2;
        assert_eq!((rope.angles.rows(), queries.rows(), rope.head_size), (keys.rows(), keys.rows(), shape.head_size));
        assert!(2 * pairs <= shape.head_size && queries.cols() == shape.num_heads * shape.head_size);
        let address = floats_mut(keys);
        let store = self.store_parameter((keys, address), stored, kv)?;
        let stores_later = store.storage == store_kv::Q8;
        let rotate = RotateParameter {
            // With no blocks the kernel stores nothing.
            store: StoreParameter { num_blocks: if stores_later { 0 } else { store.num_blocks }, ..store },
            queries: floats_mut(queries),
            angles: floats(rope.angles),
            num_rows: slots.len() as u32,
            num_heads: shape.num_heads as u32,
            pairs: pairs as u32,
            interleaved: elementwise::style_code(rope.style),
        };
        Ok((rotate, stores_later.then_some(store)))
    }

    /// Rotates queries and keys, stores keys and values, and attends. In a step of single tokens one kernel does all of
    /// it.
    pub(crate) fn attend(
        &mut self,
        call: Attend<'_>,
        queries: &mut Tensor,
        keys: &mut Tensor,
        kv: &mut KvLayer,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let Attend { rope, values, slots, positions, sequences, block_tables, shape, .. } = call;
        let Attend { scale, soft_cap, window, sinks, .. } = call;
        let (values, first_value) = match values {
            Values::Rows(values) => (Some(values), 0),
            Values::InKeys { first } => (None, first),
        };
        let stored = Stored { values, slots, shape };
        let mut rotate_later = None;
        match rope {
            Some(rope) => {
                let (rotate, store) = self.rotate_parameters(rope, stored, [&mut *queries, keys], kv)?;
                if store.is_none() && self.current.is_step() {
                    rotate_later = Some(rotate);
                } else {
                    self.launch_rotate(&rotate, store.as_ref())?;
                }
            }
            None => self.store_kv(keys, stored, kv)?,
        }
        let attention = Attention { queries, kv, positions, sequences, block_tables, shape, scale, soft_cap, window };
        self.attention(attention, Extras { sinks, rotate: rotate_later, first_value }, out)
    }

    /// Attends, after queries and keys are rotated and stored if that is still to be done.
    pub(crate) fn attention(
        &mut self,
        attention: Attention<'_>,
        Extras { sinks, rotate, first_value }: Extras<'_>,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let shape = attention.shape;
        let value_size = shape.head_size - first_value;
        let num_rows = attention.queries.rows();
        assert_eq!(attention.queries.cols(), shape.num_heads * shape.head_size);
        assert_eq!((out.rows(), out.cols()), (num_rows, shape.num_heads * value_size));
        assert_eq!(attention.positions.len(), num_rows);
        assert!(sinks.is_none_or(|sinks| sinks.len() == shape.num_heads), "a sink for each head");
        if let Some(why) = prefill::refusal(shape) {
            return Err(self.device.refuse("attention", why));
        }
        self.storage(attention.kv)?;
        let mut kernel = Kernel::of_layer(attention.kv, shape).expect("a format with a kernel");
        let chunk_len = ChunkLen::of(attention.sequences);
        let row_by_row = chunk_len != ChunkLen::Long;
        let storage = match kernel {
            Kernel::Panels { storage, .. } if row_by_row => Some(storage),
            _ => None,
        };
        // Only the kernels for one token of each sequence rotate and store it themselves: with several, a row reads the
        // keys of the rows before it.
        let rotate = match (storage, chunk_len) {
            (Some(_), ChunkLen::One) => rotate,
            _ => {
                rotate.map_or(Ok(()), |rotate| store_kv::rotate_and_store(&self.device, &rotate))?;
                None
            }
        };
        let longest = attention.positions.iter().max().map_or(0, |&position| position as usize + 1);
        let mut blocks = KvBlocks {
            keys: read(&attention.kv.keys),
            // Values that are parts of keys lie where the keys lie.
            values: read(if attention.kv.values.rows() == 0 { &attention.kv.keys } else { &attention.kv.values }),
            tables: self.index(Purpose::BlockTables, attention.block_tables)?,
        };
        let converts = kernel.expands() && !row_by_row;
        if converts {
            blocks = self.expand_kv(&attention, blocks)?;
            kernel = Kernel::of(DType::F16, shape).expect("a format with a kernel");
        }
        let (num_kv_heads, head_size) = (shape.num_kv_heads, shape.head_size);
        let work = Work { num_rows, num_kv_heads, head_size, longest, row_by_row };
        let tiles = kernel.split_tiles(&self.device, work);
        // If tiles wait to be merged, a limited number of rows at a time: every row gets as much memory as the longest
        // needs.
        let most = num_rows.max(1);
        let (partial, rows_at_once) = match prefill::partial_bytes(shape.num_heads, value_size, tiles) {
            0 => (0, most),
            of_row => {
                let rows = (MAX_PARTIAL / of_row).clamp(1, most);
                (self.scratch(Purpose::Partial, of_row * rows.next_power_of_two())?, rows)
            }
        };
        let rows_address = self.row_tables(&attention)?;
        let table = |i: usize| rows_address + (4 * i * num_rows) as u64;
        let mut first_blocks = table(0);
        // Converted blocks have tables of their own.
        if !converts && let Some(windows) = self.current.find_windows(attention.block_tables) {
            (blocks.tables, first_blocks) = (windows.block_tables, windows.first_blocks);
        }
        let num_runs = attention.sequences.iter().map(|sequence| sequence.rows.len().div_ceil(RUN)).sum::<usize>();
        let parameter = AttentionParameter {
            queries: floats(attention.queries),
            key_blocks: blocks.keys,
            value_blocks: blocks.values,
            out: floats_mut(out),
            positions: self.index(Purpose::Positions, attention.positions)?,
            first_blocks,
            block_tables: blocks.tables,
            partial,
            num_rows: num_rows as u32,
            num_heads: shape.num_heads as u32,
            num_kv_heads: shape.num_kv_heads as u32,
            head_size: shape.head_size as u32,
            block_len: shape.block_len as u32,
            window: attention.window.map_or(0, |window| window as u32),
            max_tiles: tiles as u32,
            tile_len: kernel.tile_len() as u32,
            scale: attention.scale,
            cap: attention.soft_cap.unwrap_or(0.0),
            first_rows: table(1),
            end_rows: table(2),
            runs: table(3),
            num_runs: num_runs as u32,
            in_panels: kernel.in_panels(),
            num_stored: attention.kv.keys.len() as u64,
            sinks: sinks.map_or(0, floats),
        };
        let values = ValuePart { first: first_value as u32, size: value_size as u32 };
        for start in (0..num_rows).step_by(rows_at_once) {
            let rows = start..num_rows.min(start + rows_at_once);
            let part = parameter.of_rows(rows.clone(), values);
            match storage {
                None => prefill::attend(&self.device, kernel, &part, values)?,
                Some(storage) => {
                    let rotate = rotate.as_ref().map(|rotate| rotate.of_rows(rows));
                    let arrived = self.counters(decode::num_counters(&part))?;
                    decode::attend(&self.device, storage, &part, rotate.as_ref(), arrived)?;
                }
            }
        }
        Ok(())
    }

    /// Converts the blocks of a step's sequences to f16, in the order of its tables; or every block of the layer, if
    /// sequences share blocks to such an extent that this is no more.
    fn expand_kv(&mut self, attention: &Attention<'_>, blocks: KvBlocks) -> Result<KvBlocks, Error> {
        let (num_entries, block) = (attention.block_tables.len(), attention.kv.keys.cols());
        let capacity = num_entries.next_power_of_two().min(attention.kv.keys.rows());
        let in_order = num_entries <= capacity;
        let parameter = ExpandParameter {
            key_blocks: blocks.keys,
            value_blocks: blocks.values,
            block_tables: blocks.tables,
            keys: self.scratch(Purpose::ExpandedKeys, capacity * block * 2)?,
            values: self.scratch(Purpose::ExpandedValues, capacity * block * 2)?,
            own_tables: if in_order { self.scratch(Purpose::ExpandedTables, capacity * 4)? } else { 0 },
            num_stored: attention.kv.keys.len() as u64,
            num_kv_heads: attention.shape.num_kv_heads as u32,
            head_size: attention.shape.head_size as u32,
            block_len: attention.shape.block_len as u32,
        };
        store_kv::expand(&self.device, num_entries, &parameter)?;
        let tables = if in_order { parameter.own_tables } else { blocks.tables };
        Ok(KvBlocks { keys: parameter.keys, values: parameter.values, tables })
    }

    fn store_parameter(
        &mut self,
        (keys, address): (&Tensor, u64),
        Stored { values, slots, shape }: Stored<'_>,
        kv: &KvLayer,
    ) -> Result<StoreParameter, Error> {
        let cols = shape.num_kv_heads * shape.head_size;
        assert_eq!((keys.rows(), keys.cols()), (slots.len(), cols));
        assert!(values.is_none_or(|values| (values.rows(), values.cols()) == (slots.len(), cols)));
        assert_eq!(values.is_none(), kv.values.rows() == 0, "values are stored unless they are parts of keys");
        Ok(StoreParameter {
            keys: address,
            values: values.map_or(0, floats),
            key_blocks: read(&kv.keys),
            value_blocks: read(&kv.values),
            slots: self.index(Purpose::Slots, slots)?,
            num_kv_heads: shape.num_kv_heads as u32,
            head_size: shape.head_size as u32,
            block_len: shape.block_len as u32,
            num_blocks: kv.keys.rows() as u32,
            storage: self.storage(kv)?,
            in_panels: Kernel::of_layer(kv, shape).map_or(0, Kernel::in_panels),
        })
    }

    /// Address of the tables of `step::row_tables`.
    fn row_tables(&mut self, attention: &Attention<'_>) -> Result<u64, Error> {
        match self.current.find_spans(attention.sequences) {
            Some(address) => Ok(address),
            None => {
                let tables = step::row_tables(attention.sequences, attention.queries.rows());
                self.index(Purpose::RowTables, &tables)
            }
        }
    }

    fn storage(&self, kv: &KvLayer) -> Result<u32, Error> {
        let dtype = kv.keys.dtype();
        store_kv::storage(dtype).ok_or_else(|| {
            self.device
                .refuse("attention", format!("keys and values in {dtype} have no kernel; use F32, F16, BF16 or Q8_0"))
        })
    }
}
