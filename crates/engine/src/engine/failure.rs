//! Failure of a step: its requests end with the error, and all requests end when the device is lost.

use std::collections::BTreeSet;

use super::{Engine, PlannedChunk};
use crate::sequence_group::GroupId;
use crate::{Error, Event};

impl Engine {
    /// Ends every request of a failed step; every request of the engine if the device is lost.
    pub(super) fn fail_step(&mut self, chunks: &[PlannedChunk], error: Error) {
        if matches!(error, Error::DeviceLost(_)) {
            return self.fail_all(&error);
        }
        let groups: BTreeSet<GroupId> = chunks.iter().map(|chunk| chunk.group).collect();
        for id in groups {
            self.fail_request(id, error.clone());
        }
    }

    /// Ends one running request with an error.
    pub(super) fn fail_request(&mut self, id: GroupId, error: Error) {
        if let Some(mut group) = self.running.remove(&id) {
            group.release(&mut self.cache);
            group.sink.send(Event::Failed(error));
            self.stats.failed_requests += 1;
        }
    }

    /// Ends every request, running or waiting, because the device that held the model is lost.
    fn fail_all(&mut self, error: &Error) {
        self.is_lost = true;
        self.look_ahead.clear();
        let ids: Vec<GroupId> = self.running.keys().copied().collect();
        ids.into_iter().for_each(|id| self.fail_request(id, error.clone()));
        for (_, mut group) in std::mem::take(&mut self.waiting).into_values().flatten() {
            group.release(&mut self.cache);
            group.sink.send(Event::Failed(error.clone()));
            self.stats.failed_requests += 1;
        }
    }

    /// Whether the device is lost. There will be no further step.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }
}
