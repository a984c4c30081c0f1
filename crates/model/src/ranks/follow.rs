//! The steps of ranks: rank 0 announces what it runs, and the others run it too.
//!
//! Rank 0 sends the tokens, positions, blocks and recurrent states of a step before it computes, together with the
//! copies of blocks and of states that were made since the last one. The others allocate KV memory of the same number
//! of blocks and slots when they first hear of it, make the copies and compute the step; the logits that they get are
//! thrown away. They know no request and no owner of a block or slot.

use pellucid_tensor::{Error as DeviceError, Patience};

use super::exchange::{Exchange, Ranks};
use super::message::{HEAD_BYTES, Head, KvShape, Message};
use crate::{Batch, Error, KvMemory};

impl Ranks {
    /// Begins a step of which the arguments were checked. Rank 0 announces it to the others.
    pub(crate) fn begin_step(&mut self, batch: &Batch, kv: &mut KvMemory) -> Result<(), Error> {
        let Exchange { communicator, is_in_step, .. } = &mut self.exchange;
        if std::mem::replace(is_in_step, true) {
            let reason = "a step ended with an internal error, and ranks no longer keep pace with each other";
            communicator.abort(reason);
            let (device, operation) = (format!("the group of {} ranks", communicator.num_ranks()), "a step");
            return Err(DeviceError::Lost { device, operation, reason: reason.into() }.into());
        }
        if communicator.rank() > 0 {
            return Ok(());
        }
        let mut rest = Vec::new();
        let mut head = Message::write_step(KvShape::of(kv), &kv.take_copies(), batch, &mut rest)?;
        communicator.broadcast(&mut head, Patience::Step)?;
        Ok(communicator.broadcast(&mut rest, Patience::Step)?)
    }

    /// Ends a step. A step that failed on one rank ends the work of all: the others have computed it.
    pub(crate) fn end_step<T>(&mut self, outcome: Result<T, Error>) -> Result<T, Error> {
        self.exchange.is_in_step = false;
        outcome.inspect_err(|error| self.exchange.communicator.abort(&error.to_string()))
    }

    /// Waits for the next message of rank 0.
    pub(super) fn receive(&mut self) -> Result<Message, Error> {
        let communicator = &mut self.exchange.communicator;
        assert!(communicator.rank() > 0, "rank 0 announces steps");
        let mut head = [0; HEAD_BYTES];
        communicator.broadcast(&mut head, Patience::Idle)?;
        let head = Head::read(head)?;
        let mut rest = vec![0; head.len];
        if !rest.is_empty() {
            communicator.broadcast(&mut rest, Patience::Step)?;
        }
        Message::read(head, &rest)
    }
}

impl Drop for Ranks {
    /// Rank 0 ends the work of the others, and waits for those in its process. If a rank was lost, it has ended.
    fn drop(&mut self) {
        let communicator = &mut self.exchange.communicator;
        if communicator.rank() == 0 {
            _ = communicator.broadcast(&mut Message::shut_down(), Patience::Step);
        }
        for follower in self.followers.drain(..) {
            _ = follower.join();
        }
    }
}

impl crate::Decoder {
    /// Runs the steps that rank 0 announces, until it shuts down: the work of every other rank. An error ends the work
    /// of all.
    pub fn follow(&mut self) -> Result<(), Error> {
        let outcome = self.follow_steps();
        if let (Err(error), Some(ranks)) = (&outcome, self.ranks_mut()) {
            ranks.exchange.communicator.abort(&error.to_string());
        }
        outcome
    }

    fn follow_steps(&mut self) -> Result<(), Error> {
        let backend = self.backend().clone();
        let mut memory: Option<KvMemory> = None;
        loop {
            let ranks = self.ranks_mut().expect("the model was loaded on one of several ranks");
            let Message::Step(step) = ranks.receive()? else { return Ok(()) };
            let mut kv = match memory.take().filter(|kv| KvShape::of(kv) == step.kv) {
                Some(kv) => kv,
                None => {
                    let KvShape { dtype, num_blocks, block_len, num_slots } = step.kv;
                    let config = crate::Model::config(self);
                    let kv = KvMemory::new(config, &*backend, dtype, num_blocks, block_len)?;
                    kv.with_states(config, &*backend, num_slots)?
                }
            };
            for [from, to] in step.copies.blocks {
                kv.copy_block(&*backend, from, to)?;
            }
            for [from, to] in step.copies.states {
                kv.copy_state(&*backend, from, to)?;
            }
            kv.take_copies();
            self.launch_step(&step.batch, &mut kv)?;
            memory = Some(kv);
        }
    }
}
