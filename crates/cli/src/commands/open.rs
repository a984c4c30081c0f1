//! `pellucid open`: serves a model and opens its page in the browser, as `serve --open` does.

use std::ffi::OsString;

/// Serve a model and open its page in the browser
///
/// The same as `pellucid serve --open --model MODEL`. Further settings of
/// `serve` are read from the environment and the config file. Where no browser
/// can be opened, the log says where the page is.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct OpenArgs {
    /// Name or path of a model
    /// [default: qwen2.5-coder-1.5b, 1.1 GB, downloaded on first use]
    #[arg(verbatim_doc_comment, value_name = "MODEL")]
    model: Option<OsString>,

    /// Port to listen at; 0 is any free port [default: 8000]
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
}

impl OpenArgs {
    /// Returns the command line of `serve` that this one stands for.
    pub(crate) fn serve_arguments(&self) -> Vec<OsString> {
        let port = self.port.map(|port| ["--port".into(), port.to_string().into()]);
        page_arguments(self.model.clone()).into_iter().chain(port.into_iter().flatten()).collect()
    }
}

/// Returns the command line of `serve` that opens the page of a model.
pub(crate) fn page_arguments(model: Option<OsString>) -> Vec<OsString> {
    let model = model.map(|model| ["--model".into(), model]);
    ["pellucid", "serve", "--open"].map(OsString::from).into_iter().chain(model.into_iter().flatten()).collect()
}
