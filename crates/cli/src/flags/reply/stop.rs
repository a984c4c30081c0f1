//! The texts that end a reply; `run` and `explain` share the flag.

use anyhow::Result;

use crate::flags::usage_error::bail_usage;

#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct StopArgs {
    /// End the reply before this text; may be given again
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
}

impl StopArgs {
    /// Whether the flag was given.
    pub(crate) fn is_given(&self) -> bool {
        !self.stop.is_empty()
    }

    /// Returns the texts. An empty one, which would end every reply at once, is an error.
    pub(crate) fn texts(&self) -> Result<Vec<String>> {
        if self.stop.iter().any(String::is_empty) {
            bail_usage!("--stop: expected a text that is not empty");
        }
        Ok(self.stop.clone())
    }
}
