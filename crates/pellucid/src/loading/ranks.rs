//! Ranks: groups of threads, or processes, that compute one model together.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use pellucid_checkpoint::Checkpoint;
use pellucid_model::{Decoder, GroupMember, LoadOptions, RankIdentity};
use pellucid_tensor::{Backend, Communicator};

use super::load_decoder_by;
use crate::{DeviceOptions, Error, LoadEvent};

/// Time in which a group of threads must take part in an exchange. Threads of one process are late only if the machine
/// is overloaded.
const THREADS_TIME_LIMIT: Duration = Duration::from_secs(60);

/// The ranks that compute a model together. Each has a share of the rows of every weight; their number changes no byte
/// of a reply.
#[derive(Debug, Default)]
#[non_exhaustive]
pub enum Ranks {
    /// One rank: this process with all of its threads.
    #[default]
    One,
    /// Groups of threads of this process, each with its share of the threads.
    Threads(NonZeroUsize),
    /// This process is one of several.
    Process {
        /// Connects it with the others.
        communicator: Box<dyn Communicator>,
        /// Identifies the build of the program, which must be the same on all ranks.
        build: String,
    },
}

impl Ranks {
    /// Returns the options of the device of one rank: with several in this process, each has a part of the threads.
    pub fn device_of_one(&self, device: &DeviceOptions) -> DeviceOptions {
        match self {
            Ranks::Threads(num_ranks) => device.shared_by(*num_ranks),
            Ranks::One | Ranks::Process { .. } => *device,
        }
    }

    /// Whether this process follows another one, which has the engine.
    pub fn follows(&self) -> bool {
        matches!(self, Ranks::Process { communicator, .. } if communicator.rank() > 0)
    }
}

/// Loads the weights of a checkpoint onto ranks, of which this one has the open `backend`. `device` describes it, and
/// those of the other ranks of this process.
///
/// A process that is not rank 0 follows that rank until it shuts down, and returns [`Error::RankEnded`] then.
pub fn load_decoder_on_ranks(
    ranks: Ranks,
    checkpoint: &Checkpoint,
    options: LoadOptions,
    (device, backend): (&DeviceOptions, &Arc<dyn Backend>),
    on_event: &mut dyn FnMut(LoadEvent),
) -> Result<Decoder, Error> {
    match ranks {
        Ranks::One => crate::load_decoder(checkpoint, options, backend, on_event),
        Ranks::Threads(num_ranks) => {
            let device = device.shared_by(num_ranks);
            let mut backends = vec![backend.clone()];
            for _ in 1..num_ranks.get() {
                backends.push(device.open(&mut |_| ())?);
            }
            let members = GroupMember::of(checkpoint, backends, THREADS_TIME_LIMIT);
            // One program has one build.
            let identity = RankIdentity::of_build("");
            load_decoder_by(checkpoint, options, backend, on_event, |progress| {
                Decoder::load_group(members, options, &identity, progress)
            })
        }
        Ranks::Process { communicator, build } => {
            let (rank, identity) = (communicator.rank(), RankIdentity::of_build(build));
            let mut decoder = load_decoder_by(checkpoint, options, backend, on_event, |progress| {
                Decoder::load_on_rank(checkpoint, backend.clone(), options, communicator, identity, progress)
            })?;
            if rank == 0 {
                return Ok(decoder);
            }
            let load_error = |source| Error::Load { path: checkpoint.path().to_owned(), source: Box::new(source) };
            decoder.follow().map_err(load_error)?;
            Err(Error::RankEnded { rank })
        }
    }
}
