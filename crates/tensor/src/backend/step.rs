//! One step of a model, as a backend sees it: the token of each row, and the digests of its logits.

use std::any::Any;

use crate::{SequenceSpan, StateSave, StateSpan};

/// The token of a row, or the source from which the device takes it.
///
/// With [`TokenSource::Assumed`] a step can be launched before the one that it follows has ended. Only devices whose
/// digests say what they assume ([`RowDigest::assumed`]) accept it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenSource {
    /// This token.
    Token(u32),
    /// The token that the device assumed for this row of the digests that it made last, in a step with the same KV
    /// memory. Where it assumed none, any token may be read, and the results of the row are meaningless.
    Assumed { row: u32 },
    /// The token in this row of a slot, see [`Backend::keep_assumed`](crate::Backend::keep_assumed).
    Kept { slot: u32, row: u32 },
}

impl TokenSource {
    /// Returns the token; `None` while only the device knows it.
    pub fn token(self) -> Option<u32> {
        match self {
            TokenSource::Token(token) => Some(token),
            TokenSource::Assumed { .. } | TokenSource::Kept { .. } => None,
        }
    }
}

/// Rows of an embedding table.
#[derive(Debug, Clone, Copy)]
pub enum TableRows<'a> {
    Tokens(&'a [TokenSource]),
    Positions(&'a [u32]),
}

impl TableRows<'_> {
    pub fn len(&self) -> usize {
        match self {
            TableRows::Tokens(tokens) => tokens.len(),
            TableRows::Positions(positions) => positions.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the table row of `row`, for a backend that assumes no tokens.
    pub fn get(&self, row: usize) -> u32 {
        match self {
            TableRows::Tokens(tokens) => tokens[row].token().expect("only a device that makes digests assumes tokens"),
            TableRows::Positions(positions) => positions[row],
        }
    }
}

/// The tables of one step. The operations of the step get the same slices, so a backend can recognise them by address.
#[derive(Debug, Clone, Copy)]
pub struct StepIndex<'a> {
    pub ids: &'a [TokenSource],
    pub positions: &'a [u32],
    pub slots: &'a [u32],
    pub wanted: &'a [u32],
    pub sequences: &'a [SequenceSpan],
    pub block_tables: &'a [u32],
    /// The slots and block tables of layers with sliding windows, if these have blocks of their own; else empty.
    pub window_slots: &'a [u32],
    pub window_tables: &'a [u32],
    /// For a model with a layer that predicts further tokens, where the row of the position before each row is stored;
    /// else empty.
    pub previous_slots: &'a [u32],
    /// The states of each sequence; empty for a model without states.
    pub states: &'a [StateSpan],
    pub saves: &'a [StateSave],
    /// The digest queries of the wanted rows; empty if the rows themselves are wanted.
    pub queries: &'a [RowQuery],
    /// Address of the KV memory's list of layers, which identifies the KV memory while it exists.
    pub kv_address: usize,
}

/// State that a backend keeps from step to step of one model. The model owns it and does not look inside.
#[derive(Debug, Default)]
pub struct StepMemo(pub Option<Box<dyn Any + Send>>);

/// A query for the digest of a row of logits, see [`Backend::digest`](crate::Backend::digest).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowQuery {
    /// The second temperature, beside 1, at which weights are summed.
    pub temperature: f64,
    /// Seed and position of a draw from the whole row, if there is one.
    pub race: Option<(u64, u32)>,
    /// If there is no race: the truncating steps before the draw, if they have the default order.
    pub shortlist: Option<Shortlist>,
}

/// Top-k, top-p and min-p in this order, and the seed and position of the draw after them: the `k` highest logits, of
/// those the smallest set whose share of the weights reaches `p`, of those the ones with at least `min_p` of the
/// highest weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shortlist {
    pub draw: (u64, u32),
    pub k: u32,
    pub p: f32,
    pub min_p: f32,
}

/// Statistics of a row of logits that suffice for most samplers. The crate `sampling` defines them to the bit, with a
/// reference implementation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowDigest {
    /// Every logit is a number, and the highest is finite. Otherwise the other fields are meaningless.
    pub is_plain: bool,
    /// The most probable tokens and their logits, from the highest down; ties to the lower token.
    pub top: Vec<(u32, f32)>,
    /// Whether `top` has every token whose logit is above -inf.
    pub has_all: bool,
    /// The sums of weights at temperature 1 and at the query's.
    pub totals: [f64; 2],
    /// Every token that may win the race of the query; empty without a race, or if there are too many.
    pub finalists: Vec<(u32, f32)>,
    /// The token that the device assumes to be sampled, if it assumes one: see [`TokenSource::Assumed`].
    pub assumed: Option<u32>,
}

/// Identifies digests that are being copied to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DigestTicket(pub u64);

/// The slots in which a device keeps assumed tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenSlots {
    /// Number of slots; 0 if the device keeps no tokens.
    pub num_slots: usize,
    /// Maximum tokens of a slot.
    pub num_rows: usize,
}
