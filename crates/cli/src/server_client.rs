//! Requests to a running server.

use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use serde_json::{Value, json};
use ureq::Agent;
use ureq::http::Response;

use crate::flags::usage_error::bail_usage;
use crate::http_error::sentence;

/// Address of a server on this machine with default flags.
const DEFAULT_URL: &str = "http://127.0.0.1:8000";
/// Maximum bytes of an answer.
const MAX_ANSWER_BYTES: u64 = 16 << 20;
/// Maximum time of an answer: a server that unloads a model answers when its memory is free.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The server to ask.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ServerArgs {
    /// Address of the server
    /// [default: PELLUCID_URL or http://127.0.0.1:8000]
    #[arg(long, verbatim_doc_comment, value_name = "URL")]
    url: Option<String>,

    /// Key of the server; prefer PELLUCID_API_KEY, because
    /// other users of the machine can see flags
    #[arg(long, verbatim_doc_comment, value_name = "KEY")]
    api_key: Option<String>,
}

/// Address and key of the environment.
#[derive(Debug, Default)]
pub(crate) struct ServerVariables {
    pub(crate) url: Option<String>,
    pub(crate) api_key: Option<String>,
}

/// A running server.
pub(crate) struct Client {
    agent: Agent,
    url: String,
    key: Option<String>,
}

impl Client {
    pub(crate) fn new(args: &ServerArgs, variables: &ServerVariables) -> Result<Client> {
        let url = args.url.as_deref().or(variables.url.as_deref()).unwrap_or(DEFAULT_URL);
        Client::at("--url", url, args.api_key.as_ref().or(variables.api_key.as_ref()))
    }

    /// Returns the server at an address, which a flag named.
    pub(crate) fn at(flag: &str, url: &str, key: Option<&String>) -> Result<Client> {
        let url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        if !url.starts_with("http://") && !url.starts_with("https://") {
            bail_usage!("{flag}: expected an address such as {DEFAULT_URL}, found {url:?}");
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("pellucid/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(TIMEOUT))
            .build();
        Ok(Client { agent: config.new_agent(), url, key: key.cloned() })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn get(&self, path: &str) -> Result<Value> {
        let request = self.agent.get(format!("{}{path}", self.url));
        let answer = match &self.key {
            Some(key) => request.header("Authorization", format!("Bearer {key}")).call(),
            None => request.call(),
        };
        self.read(answer)
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let request = self.agent.post(format!("{}{path}", self.url));
        let answer = match &self.key {
            Some(key) => request.header("Authorization", format!("Bearer {key}")).send_json(body),
            None => request.send_json(body),
        };
        self.read(answer)
    }

    /// Returns the JSON of an answer, or the message of an error.
    fn read(&self, answer: Result<Response<ureq::Body>, ureq::Error>) -> Result<Value> {
        let mut answer = answer.map_err(|error| match error {
            ureq::Error::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
                anyhow!("no server answers at {}; start one with `pellucid serve`, or give another address", self.url)
            }
            error => anyhow!("no server answers at {}: {}", self.url, sentence(&error, "the server")),
        })?;
        let status = answer.status();
        let body = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_json::<Value>();
        let body = match body {
            Ok(body) => body,
            Err(_) if !status.is_success() => json!({}),
            Err(error) => bail!("{} is no Pellucid server: {}", self.url, sentence(&error, "it")),
        };
        if !status.is_success() {
            let message = body["error"]["message"].as_str().unwrap_or("without a reason");
            bail!("{} answers {}: {message}", self.url, status.as_u16());
        }
        Ok(body)
    }
}
