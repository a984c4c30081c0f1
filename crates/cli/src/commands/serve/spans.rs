//! Spans of requests for an OpenTelemetry collector, over OTLP/HTTP.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pellucid_server::{SinkError, SpanExporter, SpanSink};
use tracing::{info, warn};
use ureq::Agent;
use ureq::http::Uri;

use crate::http_error::sentence;

/// Maximum time of one message to the collector.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time to send what is queued when the server ends.
const LAST_CALL: Duration = Duration::from_secs(5);

/// Export of spans.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Operations")]
pub(crate) struct SpanArgs {
    /// Send spans of requests to this OpenTelemetry collector, over
    /// OTLP/HTTP; /v1/traces is added to the address
    /// [default: OTEL_EXPORTER_OTLP_ENDPOINT, or none]
    #[arg(long, verbatim_doc_comment, value_name = "URL")]
    otlp_endpoint: Option<String>,
}

/// The environment variables of OpenTelemetry that are read.
#[derive(Debug, Default)]
pub(crate) struct SpanVariables {
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`
    pub(crate) endpoint: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, which is used as it is.
    pub(crate) traces_endpoint: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`, or the one for all signals.
    pub(crate) protocol: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_HEADERS`, or those for all signals.
    pub(crate) headers: Option<String>,
    /// `OTEL_SERVICE_NAME`
    pub(crate) service: Option<String>,
    /// `OTEL_SDK_DISABLED`
    pub(crate) disabled: Option<String>,
}

/// Address of the collector, and the headers that it needs.
#[derive(Debug, PartialEq, Eq)]
struct Destination {
    url: String,
    /// The name of the flag or variable, for messages.
    given_by: &'static str,
    headers: Vec<(String, String)>,
}

/// Starts the export of spans, if an address is given.
pub(super) fn start(args: &SpanArgs, variables: &SpanVariables) -> Result<Option<Arc<SpanExporter>>> {
    let Some(destination) = destination(args, variables)? else { return Ok(None) };
    info!("spans of requests go to {}", destination.url);
    let service = variables.service.clone().unwrap_or_else(|| "pellucid".into());
    let exporter = SpanExporter::start(Box::new(Collector::new(destination)), service);
    Ok(Some(exporter.context("cannot start the thread that exports spans")?))
}

/// Sends the last spans.
pub(super) fn finish(exporter: &SpanExporter) {
    let lost = exporter.finish(LAST_CALL);
    if lost > 0 {
        warn!("{lost} spans were not exported before the end");
    }
}

fn destination(args: &SpanArgs, variables: &SpanVariables) -> Result<Option<Destination>> {
    const FLAG: &str = "--otlp-endpoint";
    let whole = |base: &str| format!("{}/v1/traces", base.trim_end_matches('/'));
    let is_disabled = variables.disabled.as_ref().is_some_and(|value| value.trim().eq_ignore_ascii_case("true"));
    let (given, url, given_by) = match (&args.otlp_endpoint, &variables.traces_endpoint, &variables.endpoint) {
        (Some(base), _, _) => (base, whole(base), FLAG),
        _ if is_disabled => return Ok(None),
        (None, Some(url), _) => (url, url.trim().to_owned(), "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        (None, None, Some(base)) => (base, whole(base.trim()), "OTEL_EXPORTER_OTLP_ENDPOINT"),
        (None, None, None) => return Ok(None),
    };
    let is_address = |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
    if !url.parse::<Uri>().is_ok_and(|uri| is_address(&uri)) {
        bail!("{given_by}: expected an address such as http://127.0.0.1:4318, found {given:?}");
    }
    match variables.protocol.as_deref().map(str::trim) {
        None | Some("http/protobuf") => {}
        Some(other) => {
            bail!(
                "OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf, the only protocol that is spoken, found {other:?}"
            )
        }
    }
    let headers = variables.headers.as_deref().map(read_headers).transpose()?.unwrap_or_default();
    Ok(Some(Destination { url, given_by, headers }))
}

/// Reads `name=value,name=value` with values escaped as in URLs. Values may be secrets, so no message has one.
fn read_headers(text: &str) -> Result<Vec<(String, String)>> {
    let mut headers = Vec::new();
    for (number, pair) in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()).enumerate() {
        let header = pair.split_once('=').and_then(|(name, value)| Some((name.trim(), unescaped(value.trim())?)));
        let is_name = |name: &str| name.parse::<ureq::http::HeaderName>().is_ok();
        match header {
            Some((name, value)) if is_name(name) && value.parse::<ureq::http::HeaderValue>().is_ok() => {
                headers.push((name.to_owned(), value));
            }
            _ => bail!("OTEL_EXPORTER_OTLP_HEADERS: expected name=value, found something else in pair {}", number + 1),
        }
    }
    Ok(headers)
}

/// Resolves `%41`.
fn unescaped(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// An OpenTelemetry collector.
#[derive(Debug)]
struct Collector {
    agent: Agent,
    destination: Destination,
}

impl Collector {
    fn new(destination: Destination) -> Collector {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("pellucid/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(TIMEOUT))
            .build();
        Collector { agent: config.new_agent(), destination }
    }
}

impl SpanSink for Collector {
    fn send(&self, message: &[u8]) -> Result<(), SinkError> {
        let Destination { url, given_by, headers } = &self.destination;
        let mut request = self.agent.post(url).header("Content-Type", "application/x-protobuf");
        for (name, value) in headers {
            request = request.header(name, value);
        }
        match request.send(message) {
            Ok(answer) if answer.status().is_success() => Ok(()),
            Ok(answer) => {
                let status = answer.status().as_u16();
                let reason = format!("the collector of {given_by} answers {status}");
                Err(SinkError { reason, is_temporary: matches!(status, 429 | 502 | 503 | 504) })
            }
            Err(error) => Err(SinkError { reason: sentence(&error, "the collector"), is_temporary: true }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn url(flag: Option<&str>, variables: &SpanVariables) -> Option<String> {
        let args = SpanArgs { otlp_endpoint: flag.map(str::to_owned) };
        destination(&args, variables).unwrap().map(|destination| destination.url)
    }

    #[test]
    fn the_flag_comes_before_the_environment() {
        assert_eq!(url(None, &SpanVariables::default()), None);
        let mut variables = SpanVariables { endpoint: some("http://a:4318/"), ..SpanVariables::default() };
        assert_eq!(url(None, &variables), some("http://a:4318/v1/traces"));
        variables.traces_endpoint = some("https://b/own");
        assert_eq!(url(None, &variables), some("https://b/own"));
        assert_eq!(url(Some("http://c/base"), &variables), some("http://c/base/v1/traces"));
        variables.disabled = some("true");
        assert_eq!(url(None, &variables), None);
        assert_eq!(url(Some("http://c"), &variables), some("http://c/v1/traces"));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        let refused = |variables: SpanVariables| {
            let args = SpanArgs { otlp_endpoint: some("http://a") };
            destination(&args, &variables).unwrap_err().to_string()
        };
        let message = refused(SpanVariables { protocol: some("grpc"), ..SpanVariables::default() });
        assert!(message.contains("OTEL_EXPORTER_OTLP_PROTOCOL") && message.contains("\"grpc\""), "{message}");
        let message = refused(SpanVariables { headers: some("a=b,secret"), ..SpanVariables::default() });
        assert!(message.contains("pair 2") && !message.contains("secret"), "{message}");
        let variables = SpanVariables { endpoint: some("collector:4317"), ..SpanVariables::default() };
        let message = destination(&SpanArgs::default(), &variables).unwrap_err().to_string();
        assert!(message.starts_with("OTEL_EXPORTER_OTLP_ENDPOINT: expected an address"), "{message}");
        assert!(message.ends_with("found \"collector:4317\""), "as it was given: {message}");
    }

    #[test]
    fn headers_are_pairs_with_escapes() {
        let headers = read_headers(" api-key = a%20b , x=1,").unwrap();
        assert_eq!(headers, [("api-key".into(), "a b".into()), ("x".into(), "1".into())]);
        for wrong in ["=x", "a b=c", "a=%4", "a=%zz", "a=x\ny"] {
            assert!(read_headers(wrong).is_err(), "{wrong}");
        }
    }
}
