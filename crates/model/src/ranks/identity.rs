//! [`RankIdentity`]: what must be equal on all ranks, compared before a weight is loaded.

use std::fmt::Write as _;

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{Backend, Communicator, Patience};

use super::message::HEAD_BYTES;
use crate::{DecoderConfig, Error};

/// Pieces of each tensor that are compared, and bytes of a piece. Whole files are not compared, because a rank reads
/// only its part of them.
const SAMPLES: (usize, usize) = (16, 64);
/// Maximum bytes of an identity as text.
const MAX_BYTES: usize = 1 << 20;

/// Properties of this rank: each has a name, and a value that must equal that of rank 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankIdentity {
    properties: Vec<(&'static str, String)>,
}

impl RankIdentity {
    /// Starts with the build of the program.
    pub fn of_build(build: impl Into<String>) -> RankIdentity {
        RankIdentity { properties: vec![("the build is", build.into())] }
    }

    /// Adds what the bits of results depend on: the device's arithmetic, the model's files and its configuration.
    pub(crate) fn with_model(
        mut self,
        checkpoint: &Checkpoint,
        backend: &dyn Backend,
        config: &DecoderConfig,
    ) -> RankIdentity {
        self.properties.push(("the arithmetic is", backend.arithmetic()));
        self.properties.push(("the model's files have the digest", digest(checkpoint)));
        self.properties.push(("the context has the length", config.context_len.to_string()));
        self.properties.push(("the configuration has the digest", hash(format!("{config:?}").as_bytes())));
        self
    }

    fn text(&self) -> String {
        self.properties.iter().map(|(_, value)| format!("{}\n", value.replace('\n', " "))).collect()
    }

    /// Compares the identities of all ranks with that of rank 0, on every rank. Each of them gets the first difference.
    pub(crate) fn compare(&self, communicator: &mut dyn Communicator) -> Result<(), Error> {
        let own = self.text();
        let mut len = [0; HEAD_BYTES];
        len[..8].copy_from_slice(&(own.len() as u64).to_le_bytes());
        let mut lens = vec![0; communicator.num_ranks() * HEAD_BYTES];
        // Ranks open their files and devices at different speeds.
        communicator.barrier(Patience::Idle)?;
        communicator.all_gather(&len, &vec![HEAD_BYTES; communicator.num_ranks()], &mut lens)?;
        let lens: Vec<usize> = lens
            .as_chunks::<HEAD_BYTES>()
            .0
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes.first_chunk().expect("eight bytes")) as usize)
            .collect();
        if let Some(len) = lens.iter().find(|&&len| len > MAX_BYTES) {
            return Err(Error::BadRankMessage { reason: format!("an identity of {len} bytes") });
        }
        let mut all = vec![0; lens.iter().sum()];
        communicator.all_gather(own.as_bytes(), &lens, &mut all)?;
        let mut rest = &all[..];
        let mut texts = lens.iter().map(|&len| {
            let (text, others) = rest.split_at(len);
            rest = others;
            String::from_utf8_lossy(text).into_owned()
        });
        let first = texts.next().expect("rank 0");
        let others: Vec<String> = texts.collect();
        others.iter().enumerate().try_for_each(|(i, other)| self.difference(i + 1, other, &first))
    }

    fn difference(&self, rank: usize, own: &str, first: &str) -> Result<(), Error> {
        let mut lines = [own, first].map(str::lines);
        for (what, _) in &self.properties {
            let [own, first] = lines.each_mut().map(|lines| lines.next().unwrap_or("missing").to_owned());
            if own != first {
                return Err(Error::DifferentRanks { rank, what, own, first });
            }
        }
        Ok(())
    }
}

/// Returns a digest of the names, shapes and formats of all tensors, and of samples of their bytes.
fn digest(checkpoint: &Checkpoint) -> String {
    let mut text = Vec::new();
    for info in checkpoint.tensors() {
        text.extend_from_slice(format!("{} {:?} {}\n", info.name, info.shape, info.dtype).as_bytes());
        text.extend_from_slice(&info.samples(SAMPLES.0, SAMPLES.1));
    }
    hash(&text)
}

/// FNV-1a: these are comparisons of files that should be equal, not defences against forgery.
fn hash(bytes: &[u8]) -> String {
    let step = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let mut text = String::new();
    _ = write!(text, "{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step));
    text
}
