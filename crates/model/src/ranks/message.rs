//! Messages of rank 0 to the others: the steps that it runs, and the end.
//!
//! A message is sent in two parts: a head of fixed length, which states the version, the kind and the length of the
//! rest, and the rest. All numbers are 32 bits, little endian. Lengths are checked before anything is allocated, and
//! what a message says about rows and blocks is checked before it is used.

use pellucid_tensor::{DType, SequenceSpan, StateSave, StateSpan, TokenSource};

use crate::kv_memory::KvCopies;
use crate::{Batch, Error, KvMemory};

/// Version of the messages. Ranks with different builds are refused before the first one ([`super::identity`]).
const VERSION: u32 = 2;
/// First bytes of a head.
const MAGIC: u32 = u32::from_le_bytes(*b"PRNK");
pub(super) const HEAD_BYTES: usize = 16;
/// Maximum bytes of the rest of a message: a step of a hundred thousand rows with block tables takes less.
const MAX_BYTES: usize = 16 << 20;

/// Slot of a sequence that starts without a state.
const NO_SLOT: u32 = u32::MAX;

const SHUT_DOWN: u32 = 0;
const STEP: u32 = 1;

/// A message of rank 0.
#[derive(Debug)]
pub(super) enum Message {
    ShutDown,
    Step(Box<Step>),
}

/// One step: what was done with the KV memory since the last one, and the rows to compute.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) kv: KvShape,
    /// Copies that are made before the step.
    pub(super) copies: KvCopies,
    pub(super) batch: Batch,
}

/// Format and size of the KV memory on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvShape {
    pub(super) dtype: DType,
    pub(super) num_blocks: usize,
    pub(super) block_len: usize,
    /// Number of slots for recurrent states.
    pub(super) num_slots: usize,
}

impl KvShape {
    pub(super) fn of(kv: &KvMemory) -> KvShape {
        let (num_blocks, block_len) = (kv.num_blocks(), kv.block_len());
        KvShape { dtype: kv.dtype(), num_blocks, block_len, num_slots: kv.num_slots() }
    }
}

fn malformed(reason: impl Into<String>) -> Error {
    Error::BadRankMessage { reason: reason.into() }
}

/// The kind of a message and the length of its rest, as the head states them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    kind: u32,
    pub(super) len: usize,
}

impl Head {
    pub(super) fn read(bytes: [u8; HEAD_BYTES]) -> Result<Head, Error> {
        let mut words = Words::new(&bytes);
        let [magic, version, kind, len] = [words.next()?, words.next()?, words.next()?, words.next()?];
        if (magic, version) != (MAGIC, VERSION) {
            return Err(malformed(format!("expected version {VERSION} of the messages, found {magic:#x} {version}")));
        }
        if len as usize > MAX_BYTES {
            return Err(malformed(format!("{len} bytes exceed the maximum of {MAX_BYTES}")));
        }
        Ok(Head { kind, len: len as usize })
    }
}

impl Message {
    /// Returns the message that ends the work of the other ranks: a head alone.
    pub(super) fn shut_down() -> [u8; HEAD_BYTES] {
        head(SHUT_DOWN, 0)
    }

    /// Writes a step to `rest`, and returns its head.
    pub(super) fn write_step(
        kv: KvShape,
        copies: &KvCopies,
        batch: &Batch,
        rest: &mut Vec<u8>,
    ) -> Result<[u8; HEAD_BYTES], Error> {
        rest.clear();
        let mut put = |value: u32| rest.extend_from_slice(&value.to_le_bytes());
        let dtype = KvMemory::FORMATS.iter().position(|&dtype| dtype == kv.dtype).expect("a format of KV memory");
        [dtype, kv.num_blocks, kv.block_len, kv.num_slots].into_iter().for_each(|value| put(value as u32));
        for copies in [&copies.blocks, &copies.states] {
            put(copies.len() as u32);
            copies.as_flattened().iter().for_each(|&place| put(place));
        }
        put(batch.ids.len() as u32);
        for (row, id) in batch.ids.iter().enumerate() {
            let token = id.token().ok_or_else(|| malformed(format!("row {row} has no token yet")))?;
            [token, batch.positions[row], batch.slots[row]].into_iter().for_each(&mut put);
        }
        put(batch.sequences.len() as u32);
        for (SequenceSpan { rows, blocks }, StateSpan { from, saves }) in batch.sequences.iter().zip(&batch.states) {
            [rows.end, blocks.end, saves.end].into_iter().for_each(|end| put(end as u32));
            put(from.unwrap_or(NO_SLOT));
        }
        put(batch.saves.len() as u32);
        batch.saves.iter().flat_map(|save| [save.row, save.slot]).for_each(&mut put);
        for list in [&batch.block_tables, &batch.wanted] {
            put(list.len() as u32);
            list.iter().for_each(|&value| put(value));
        }
        if rest.len() > MAX_BYTES {
            return Err(malformed(format!("a step of {} rows takes {} bytes", batch.num_rows(), rest.len())));
        }
        Ok(head(STEP, rest.len()))
    }

    /// Reads a message from its rest.
    pub(super) fn read(head: Head, rest: &[u8]) -> Result<Message, Error> {
        match head.kind {
            SHUT_DOWN => Ok(Message::ShutDown),
            STEP => Ok(Message::Step(Box::new(read_step(rest)?))),
            kind => Err(malformed(format!("kind {kind} is unknown"))),
        }
    }
}

fn head(kind: u32, len: usize) -> [u8; HEAD_BYTES] {
    let mut bytes = [0; HEAD_BYTES];
    let words = [MAGIC, VERSION, kind, len as u32].map(u32::to_le_bytes);
    bytes.copy_from_slice(words.as_flattened());
    bytes
}

fn read_step(bytes: &[u8]) -> Result<Step, Error> {
    let mut words = Words::new(bytes);
    let dtype = words.next()? as usize;
    let dtype = *KvMemory::FORMATS.get(dtype).ok_or_else(|| malformed(format!("KV format {dtype} is unknown")))?;
    let [num_blocks, block_len, num_slots] = [words.next()?, words.next()?, words.next()?].map(|value| value as usize);
    let kv = KvShape { dtype, num_blocks, block_len, num_slots };
    if kv.block_len == 0 {
        return Err(malformed("blocks hold no positions"));
    }
    let mut copies = || Ok::<_, Error>(words.list(2)?.as_chunks::<2>().0.to_vec());
    let copies = KvCopies { blocks: copies()?, states: copies()? };
    let mut batch = Batch::default();
    for &[token, position, slot] in words.list(3)?.as_chunks::<3>().0 {
        batch.ids.push(TokenSource::Token(token));
        batch.positions.push(position);
        batch.slots.push(slot);
    }
    let (mut row, mut block, mut save) = (0, 0, 0);
    for &[rows_end, blocks_end, saves_end, from] in words.list(4)?.as_chunks::<4>().0 {
        let [rows_end, blocks_end, saves_end] = [rows_end, blocks_end, saves_end].map(|end| end as usize);
        if rows_end < row || blocks_end < block || saves_end < save {
            return Err(malformed("a sequence ends before it begins"));
        }
        batch.sequences.push(SequenceSpan { rows: row..rows_end, blocks: block..blocks_end });
        batch.states.push(StateSpan { from: (from != NO_SLOT).then_some(from), saves: save..saves_end });
        (row, block, save) = (rows_end, blocks_end, saves_end);
    }
    let saves = words.list(2)?;
    batch.saves.extend(saves.as_chunks::<2>().0.iter().map(|&[row, slot]| StateSave { row, slot }));
    batch.block_tables = words.list(1)?;
    batch.wanted = words.list(1)?;
    batch.queries = vec![None; batch.wanted.len()];
    let mut blocks = copies.blocks.as_flattened().iter().chain(&batch.block_tables);
    let is_sound = (row, block, save) == (batch.num_rows(), batch.block_tables.len(), batch.saves.len())
        && blocks.all(|&block| (block as usize) < kv.num_blocks)
        && are_states_sound(kv, &copies, &batch)
        && batch.slots.iter().all(|&slot| (slot as usize) < kv.num_blocks * kv.block_len)
        && batch.wanted.iter().all(|&wanted| (wanted as usize) < row)
        && words.is_empty();
    if is_sound { Ok(Step { kv, copies, batch }) } else { Err(malformed("rows, blocks and slots do not fit together")) }
}

/// Whether all slots of recurrent states are in the memory, and states are saved after rows of their chunks, in order.
/// In a memory without states, slots have no meaning and are not used.
fn are_states_sound(kv: KvShape, copies: &KvCopies, batch: &Batch) -> bool {
    let is_slot = |slot: u32| kv.num_slots == 0 || (slot as usize) < kv.num_slots;
    let are_in_order = |(sequence, state): (&SequenceSpan, &StateSpan)| {
        let saves = &batch.saves[state.saves.clone()];
        let last = saves.last().is_none_or(|save| (save.row as usize) < sequence.rows.len());
        last && saves.is_sorted_by_key(|save| save.row)
    };
    copies.states.as_flattened().iter().all(|&slot| (slot as usize) < kv.num_slots)
        && batch.states.iter().filter_map(|state| state.from).all(is_slot)
        && batch.saves.iter().all(|save| is_slot(save.slot))
        && batch.sequences.iter().zip(&batch.states).all(are_in_order)
}

/// Reads numbers of 32 bits.
struct Words<'a> {
    rest: &'a [[u8; 4]],
}

impl<'a> Words<'a> {
    fn new(bytes: &'a [u8]) -> Words<'a> {
        Words { rest: bytes.as_chunks().0 }
    }

    fn next(&mut self) -> Result<u32, Error> {
        let (first, rest) = self.rest.split_first().ok_or_else(|| malformed("it ends too early"))?;
        self.rest = rest;
        Ok(u32::from_le_bytes(*first))
    }

    /// Reads a count and `width` numbers for each.
    fn list(&mut self, width: usize) -> Result<Vec<u32>, Error> {
        let len = (self.next()? as usize).checked_mul(width).filter(|&len| len <= self.rest.len());
        let (list, rest) = self.rest.split_at(len.ok_or_else(|| malformed("it ends too early"))?);
        self.rest = rest;
        Ok(list.iter().map(|&word| u32::from_le_bytes(word)).collect())
    }

    fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Chunk, ChunkIds, ChunkState};

    const KV: KvShape = KvShape { dtype: DType::F16, num_blocks: 9, block_len: 4, num_slots: 6 };

    fn copies() -> KvCopies {
        KvCopies { blocks: vec![[2, 3]], states: vec![[0, 5], [5, 1]] }
    }

    fn batch() -> Batch {
        let mut batch = Batch::default();
        let chunk = |ids: &'static [u32], first_position, blocks: &'static [u32], wanted, state| Chunk {
            ids: ChunkIds::Tokens(ids),
            first_position,
            blocks,
            wanted,
            queries: &[],
            state,
        };
        let saves = [(0, 2), (2, 4)].map(|(row, slot)| StateSave { row, slot });
        let state = ChunkState { from: Some(4), saves: &saves };
        batch.push(chunk(&[5, 6, 7], 3, &[8, 1], 2..3, state), KV.block_len);
        batch.push(chunk(&[9], 0, &[4], 0..1, ChunkState::default()), KV.block_len);
        batch
    }

    fn written() -> ([u8; HEAD_BYTES], Vec<u8>) {
        let mut rest = Vec::new();
        let head = Message::write_step(KV, &copies(), &batch(), &mut rest).expect("every row has a token");
        (head, rest)
    }

    #[test]
    fn a_step_is_read_as_it_was_written() {
        let (head, rest) = written();
        let head = Head::read(head).expect("a head");
        assert_eq!(head.len, rest.len());
        let Message::Step(step) = Message::read(head, &rest).expect("a step") else { panic!("a step") };
        let (found, expected) = (&step.batch, batch());
        assert_eq!((step.kv, &step.copies), (KV, &copies()));
        assert_eq!(
            (found.ids(), found.positions(), found.slots()),
            (expected.ids(), expected.positions(), expected.slots())
        );
        assert_eq!((found.sequences(), found.wanted()), (expected.sequences(), expected.wanted()));
        assert_eq!((&found.states, &found.saves), (&expected.states, &expected.saves));
        assert_eq!((found.block_tables(), found.queries()), (expected.block_tables(), expected.queries()));
        let head = Head::read(Message::shut_down()).expect("a head");
        assert!(matches!(Message::read(head, &[]), Ok(Message::ShutDown)));
    }

    #[test]
    fn damaged_messages_are_refused() {
        let (head, rest) = written();
        let kind = Head::read(head).expect("a head");
        for len in (0..rest.len()).step_by(4) {
            assert!(Message::read(kind, &rest[..len]).is_err(), "the first {len} bytes");
        }
        assert!(Message::read(kind, &[&rest[..], &[0; 4]].concat()).is_err(), "more than a step");
        // Every number replaced by one that is too large: some are free, such as tokens, but none may cause a panic.
        let with_largest = |at: usize| {
            let mut damaged = rest.clone();
            damaged[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
            Message::read(kind, &damaged)
        };
        (0..rest.len()).step_by(4).for_each(|at| drop(with_largest(at)));
        // The format; numbers of copies, a copied block and a copied state; the number of rows and a row's slot; the
        // number of sequences, the ends of the first one's saves, blocks and rows; the number of saves, a saved row and
        // its slot.
        let rows = 4 + (1 + 2) + (1 + 4);
        let sequences = rows + 1 + 4 * 3;
        let saves = sequences + 1 + 2 * 4;
        let places = [0, 4, 5, 7, 8, rows, rows + 3, sequences, sequences + 1, sequences + 2, sequences + 3];
        for word in places.into_iter().chain([saves, saves + 1, saves + 2]) {
            assert!(with_largest(4 * word).is_err(), "word {word}");
        }
        for (at, value) in [(0, 1u32), (4, 1), (12, u32::MAX)] {
            let mut damaged = head;
            damaged[at..at + 4].copy_from_slice(&value.to_le_bytes());
            assert!(Head::read(damaged).is_err(), "head with {value} at {at}");
        }
    }
}
