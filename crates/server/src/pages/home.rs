//! `GET /`: the page for browsers, a few lines of text for `curl` and for programs that probe the server, JSON for
//! those that prefer it. `GET /overview`: what is served and how to call it, without scripts.

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Request, Response, header};
use pellucid_engine::Liveness;
use serde_json::json;

use super::base_url::base_url;
use super::examples::Examples;
use super::files;
use super::html::{self, code_block, escape};
use crate::http::accept::{self, Offer};
use crate::http::error::ApiError;
use crate::models::Purpose;
use crate::reply::respond;
use crate::state::{App, SharedApp};

/// The name in examples of a server that does not tell its model.
const PLACEHOLDER: &str = "MODEL";

/// Answers `GET /` in the format that `Accept` prefers.
pub(crate) async fn home(State(app): State<SharedApp>, request: Request<Body>) -> Result<Response<Body>, ApiError> {
    if app.liveness() == Liveness::Stopped {
        return Err(pellucid_engine::Error::Stopped.into());
    }
    let base_url = base_url(&app, &request);
    let offers = ["text/plain", "text/html", "application/json"].map(|kind| Offer { kind, version: None });
    let mut response = match accept::preferred(request.headers(), &offers) {
        0 => plain(text(&app, &base_url)),
        1 => files::INDEX.respond(request.headers()),
        _ => respond::json(json(&app)),
    };
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
    Ok(response)
}

/// Answers `GET /overview`.
pub(crate) async fn overview(State(app): State<SharedApp>, request: Request<Body>) -> Response<Body> {
    html::respond(page(&app, &base_url(&app, &request)).into())
}

fn plain(text: String) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

fn text(app: &App, base_url: &str) -> String {
    let mut text = "Pellucid is running.\n\n".to_owned();
    if !app.tenants.has_keys() {
        for model in app.models.entries().iter().filter(|model| model.purpose == Purpose::Text) {
            text += &format!("model  {:?}, context of {} tokens\n", model.id, model.context_len);
        }
        if let Some(embedder) = app.models.fixed_embedder() {
            let info = embedder.info();
            text += &format!(
                "model  {:?}, vectors of {} values, texts of {} tokens\n",
                embedder.id, info.num_dimensions, info.context_len
            );
        }
    }
    text += &format!("API    {base_url}/v1 (OpenAI's API)\ndocs   {base_url}/docs\n");
    text
}

fn json(app: &App) -> String {
    let mut about =
        json!({ "name": "pellucid", "status": "ok", "api": "/v1", "docs": "/docs", "openapi": "/openapi.json" });
    if !app.tenants.has_keys() {
        about["version"] = json!(env!("CARGO_PKG_VERSION"));
        about["models"] = json!(app.model_names());
    }
    about.to_string()
}

/// Returns the links at the top of a page. `current` is the path of the page.
pub(super) fn navigation(current: &str) -> String {
    let link = |path: &str, name: &str| {
        let is_current = if path == current { " aria-current=\"page\"" } else { "" };
        format!("<a href=\"{path}\"{is_current}>{name}</a>")
    };
    let links =
        [("/", "Chat"), ("/overview", "Overview"), ("/docs", "API"), ("/metrics", "Metrics"), ("/health", "Health")];
    let links: Vec<String> = links.into_iter().map(|(path, name)| link(path, name)).collect();
    format!(
        "<header><a class=\"brand\" href=\"/\">Pellucid</a><nav aria-label=\"Pages\">{}</nav></header>\n",
        links.join("\n")
    )
}

fn page(app: &App, base_url: &str) -> String {
    let needs_key = app.tenants.has_keys();
    let id = app.model_names().first().map_or(PLACEHOLDER, |name| name);
    let (name, title) = match needs_key {
        true => (PLACEHOLDER, "Pellucid".to_owned()),
        false => (id, format!("{id} · Pellucid")),
    };
    let first_text = app.models.entries().iter().find(|model| model.purpose == Purpose::Text);
    let can_chat = needs_key || first_text.is_some_and(|model| model.has_template);
    let examples = Examples { base_url, model: name, needs_key, can_chat };
    let mut body = navigation("/overview");
    body += "<main>\n<section class=\"lead\">\n<p class=\"status\">Running</p>\n";
    body += &match needs_key {
        true => "<h1>This server needs a key</h1>\n<p>It answers OpenAI's API. Requests carry a key as \
                 <code>Authorization: Bearer KEY</code>; with it, <a href=\"/v1/models\">/v1/models</a> names the \
                 model.</p>\n"
            .to_owned(),
        false => format!(
            "<h1>{}</h1>\n<p>This server answers OpenAI's API with this model. No key is needed{}.</p>\n",
            escape(id),
            if app.loopback_hosts_only { "; only this machine can reach it" } else { "" },
        ),
    };
    body += "</section>\n";
    if !needs_key {
        body += &facts(app);
    }
    body += "<section>\n<h2>Call it</h2>\n";
    body += &format!("<p>Base URL for OpenAI's clients: <code class=\"copy\">{}/v1</code></p>\n", escape(base_url));
    if first_text.is_some() {
        body += &code_block("Shell", &examples.shell());
        body += &code_block("Python, pip install openai", &examples.python());
        body += &code_block("JavaScript, npm install openai", &examples.javascript());
    } else {
        body += &code_block("Shell", &examples.embeddings_shell());
    }
    body += "<p class=\"hint\">A click selects a whole example.</p>\n</section>\n";
    body += "<section>\n<h2>More</h2>\n<ul class=\"links\">\n";
    for (path, about) in [
        ("/docs", "every route and field"),
        ("/openapi.json", "the same as an OpenAPI document, for programs"),
        ("/v1/models", "the model and its limits"),
        ("/metrics", "counters and latencies for Prometheus"),
        ("/health", "whether the server is alive, without a key"),
    ] {
        let key = if needs_key && !["/docs", "/health"].contains(&path) { " (with a key)" } else { "" };
        body += &format!("<li><a href=\"{path}\">{path}</a> {about}{key}</li>\n");
    }
    body += "</ul>\n</section>\n</main>\n";
    html::page(&title, &body)
}

/// Returns the facts that concern a caller.
fn facts(app: &App) -> String {
    let limits = &app.limits;
    let mut rows = Vec::new();
    for model in app.models.entries().iter().filter(|model| model.purpose == Purpose::Text) {
        if app.models.entries().len() > 1 {
            rows.push(("Model", model.id.clone()));
        }
        rows.push(("Also called", model.aliases.join(", ")));
        rows.push(("Context", format!("{} tokens, prompt and reply together", grouped(model.context_len))));
        let chat = match model.has_template {
            true => "Chat and completions",
            false => "Completions; it has no chat template",
        };
        rows.push(("Answers", chat.to_owned()));
    }
    if let Some(embedder) = app.models.fixed_embedder() {
        let info = embedder.info();
        let (dimensions, tokens) = (grouped(info.num_dimensions), grouped(info.context_len));
        rows.push(("Embeddings", format!("{}: {dimensions} values, texts of {tokens} tokens", embedder.id)));
    }
    rows.push(("Device", app.device.clone()));
    rows.push(("Longest reply", format!("{} seconds", grouped(limits.request_timeout.as_secs() as usize))));
    rows.push(("Largest request", size(limits.max_body_bytes)));
    rows.push(("Version", env!("CARGO_PKG_VERSION").to_owned()));
    let rows: Vec<String> = rows
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("<div><dt>{name}</dt><dd>{}</dd></div>\n", escape(&value)))
        .collect();
    format!("<section>\n<dl class=\"facts\">\n{}</dl>\n</section>\n", rows.concat())
}

/// Returns a number of bytes in the largest unit that divides it.
fn size(num_bytes: usize) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.into_iter().find(|(_, shift)| num_bytes > 0 && num_bytes.trailing_zeros() >= *shift);
    let (unit, shift) = unit.unwrap_or(("bytes", 0));
    format!("{} {unit}", grouped(num_bytes >> shift))
}

/// Returns a number with its digits in groups of three.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
