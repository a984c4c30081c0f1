//! `/api/pull` of the server: the downloads of `pellucid pull`, with their progress for the client.

use std::sync::Arc;

use pellucid_server::{ModelPuller, PullProgress, PullReport};

use super::later_models::LaterModels;
use crate::hub::Hub;

/// Downloads models into the store of this program.
#[derive(Debug)]
pub(super) struct HubPuller {
    pub(super) hub: Hub,
    /// Serves what was pulled, if the server has several models.
    pub(super) later: Option<Arc<LaterModels>>,
}

/// Default revision of a repository.
const REVISION: &str = "main";

impl ModelPuller for HubPuller {
    fn check(&self, name: &str) -> Result<(), String> {
        Hub::check_name(name).map_err(|error| error.to_string())
    }

    fn pull(&self, name: &str, report: PullReport) -> Result<(), String> {
        let observer =
            move |file: &str, completed, total| report(PullProgress { file: file.to_owned(), completed, total });
        match self.hub.observed(Arc::new(observer)).pull(name, REVISION) {
            Ok(manifest) => {
                tracing::info!(model = manifest.name, "pulled");
                if let Some(later) = &self.later {
                    later.note_pull(&manifest, name);
                }
                Ok(())
            }
            // The log has all of it; further lines advise the operator and name paths of this machine.
            Err(error) => {
                tracing::warn!("a pull failed: {error:#}");
                Err(format!("{error:#}").lines().next().unwrap_or_default().to_owned())
            }
        }
    }
}
