//! The router: all routes, and the middleware that every request passes (request id, log line, authentication, CORS).

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use axum::middleware::{self, Next};
use axum::routing::get;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::body;
use super::caller::{self, Caller, RequestId};
use super::error::ApiError;
use super::error::form::ErrorForm;
use super::listen::{Connection, MAX_HEADER_BYTES};
use super::route_table::RouteTable;
use super::routes;
use crate::anthropic::routes as anthropic;
use crate::connection::client_address::ClientAddress;
use crate::llama_cpp::routes as llama_cpp;
use crate::models::routes as models;
use crate::ollama::{embed, not_offered, pull, routes as ollama};
use crate::openai::embeddings::{self, rerank};
use crate::openai::models::ModelCard;
use crate::openai::openapi;
use crate::pages::docs::DocsPage;
use crate::pages::{files, home};
use crate::random;
use crate::reply::{respond, websocket};
use crate::responses::routes as responses;
use crate::running::routes as running;
use crate::spans::request_trace::RequestTrace;
use crate::state::SharedApp;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The same id, in the header that Anthropic's clients read.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Returns the router with all routes and middleware.
pub(crate) fn router(app: &SharedApp) -> Router {
    let (router, api) = OpenApiRouter::new()
        .routes(routes!(routes::chat))
        .routes(routes!(routes::completions))
        .routes(routes!(responses::create))
        .routes(routes!(responses::input_tokens))
        .routes(routes!(responses::retrieve, responses::delete))
        .routes(routes!(responses::input_items))
        .routes(routes!(responses::cancel))
        .routes(routes!(anthropic::messages))
        .routes(routes!(anthropic::count_tokens))
        .routes(routes!(llama_cpp::completion))
        .routes(routes!(llama_cpp::infill))
        .routes(routes!(llama_cpp::props))
        .routes(routes!(llama_cpp::slots))
        .routes(routes!(llama_cpp::chat_alias))
        .routes(routes!(llama_cpp::completions_alias))
        .routes(routes!(llama_cpp::models_alias))
        .routes(routes!(ollama::chat))
        .routes(routes!(ollama::generate))
        .routes(routes!(embed::embed))
        .routes(routes!(ollama::tags))
        .routes(routes!(ollama::ps))
        .routes(routes!(ollama::show))
        .routes(routes!(ollama::version))
        .routes(routes!(pull::pull))
        .routes(routes!(embeddings::embeddings))
        .routes(routes!(rerank::rerank))
        .routes(routes!(routes::models))
        .routes(routes!(routes::model))
        .routes(routes!(websocket::stream))
        .routes(routes!(routes::tokenize))
        .routes(routes!(routes::detokenize))
        .routes(routes!(routes::apply_template))
        .routes(routes!(models::load))
        .routes(routes!(models::unload))
        .routes(routes!(running::list))
        .routes(routes!(running::cancel))
        .routes(routes!(routes::health))
        .routes(routes!(routes::ready))
        .routes(routes!(routes::metrics))
        .split_for_parts();
    let table =
        Arc::new(RouteTable::new(&api, &["/", "/docs", "/openapi.json", "/overview", "/page/app.css", "/page/app.js"]));
    let (unknown, wrong) = (table.clone(), table);
    let has_keys = app.tenants.has_keys();
    // Without a key, the page must not name the model.
    let docs = openapi::document(api.clone(), has_keys, app, !has_keys);
    let docs = DocsPage::new(&docs, &app.own_url, has_keys);
    let document = openapi::document(api, has_keys, app, true);
    let document: Arc<str> = document.to_string().into();
    let mut router = router
        .route("/", get(home::home))
        .route("/overview", get(home::overview))
        .route("/page/app.js", get(async |headers: HeaderMap| files::SCRIPT.respond(&headers)))
        .route("/page/app.css", get(async |headers: HeaderMap| files::STYLE.respond(&headers)))
        .route("/docs", get(async move || docs.respond()))
        .route("/openapi.json", get(async move || respond::json(document.to_string())))
        .fallback(async move |State(app): State<SharedApp>, request: Request<Body>| {
            unknown_route(&app, &request, &unknown)
        })
        .method_not_allowed_fallback(async move |request: Request<Body>| wrong_method(&request, &wrong))
        .with_state(app.clone())
        .layer(CatchPanicLayer::custom(internal_error))
        .layer(middleware::from_fn_with_state(app.clone(), check_purpose))
        .layer(middleware::from_fn_with_state(app.clone(), caller::authenticate));
    if !app.cors_origins.is_empty() {
        router = router.layer(cors(&app.cors_origins));
    }
    router.layer(middleware::from_fn_with_state(app.clone(), identify))
}

/// Refuses a route that none of the server's models can serve: text from a model that computes vectors, or vectors from
/// one that generates text.
async fn check_purpose(State(app): State<SharedApp>, request: Request<Body>, next: Next) -> Response<Body> {
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    match route.map(|route| openapi::check_purpose(&app, &route)) {
        Some(Err(error)) => {
            body::discard(&app, request).await;
            error.into()
        }
        _ => next.run(request).await,
    }
}

/// Prefix of the route that describes one model.
const MODELS: &str = "/v1/models/";

/// Gives the request an id, and records its status in the log and the metrics.
async fn identify(State(app): State<SharedApp>, mut request: Request<Body>, next: Next) -> Response<Body> {
    let started = Instant::now();
    let id = request_id(&request);
    request.extensions_mut().insert(RequestId(id.clone()));
    // Log and metrics name the route, not the path: paths may hold secrets, and there is no bound on their number.
    let route = match request.extensions().get::<MatchedPath>() {
        Some(path) => path.as_str().to_owned(),
        // A model name that contains slashes matches no route; see `unknown_route`.
        None if request.uri().path().starts_with(MODELS) => format!("{MODELS}{{id}}"),
        None => "unknown".to_owned(),
    };
    let method = request.method().clone();
    let trace = begin_trace(&app, &request, &route, &id);
    if let Some(trace) = &trace {
        request.extensions_mut().insert(trace.clone());
    }
    let error_form = ErrorForm::of(request.uri().path());
    let connection = request.extensions().get::<Connection>();
    let refusal = connection.and_then(|connection| connection.slot().refusal);
    let client = connection.map(|connection| app.proxies.client(connection.peer(), request.headers()));
    request.extensions_mut().insert(client.map(ClientAddress));
    let checked = match refusal {
        // A connection beyond the limits is answered for health checks only.
        Some(refusal) if request.uri().path() != "/health" => Err(refusal.error()),
        _ => check_headers(&request),
    };
    let mut response = match checked {
        Ok(()) => next.run(request).await,
        Err(error) => error.into(),
    };
    error_form.apply(&mut response, &id);
    let status = response.status().as_u16();
    app.metrics.count_http(&route, status);
    let time_ms = (started.elapsed().as_secs_f64() * 1e6).round() / 1e3;
    let client = client.map(tracing::field::display);
    if let Some(trace) = &trace {
        trace.set("http.response.status_code", usize::from(status));
        if status >= 500 {
            trace.fail(response.status().canonical_reason().unwrap_or("server error"));
        }
    }
    let trace_id = trace.map(|trace| trace.id());
    tracing::info!(request_id = id, trace_id, client, method = method.as_str(), route, status, time_ms, "request");
    if let Ok(id) = HeaderValue::from_str(&id) {
        if error_form == ErrorForm::Anthropic {
            response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id.clone());
        }
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Begins the spans of a request. Monitoring has none: it would be most of them.
fn begin_trace(app: &SharedApp, request: &Request<Body>, route: &str, id: &str) -> Option<Arc<RequestTrace>> {
    if ["/health", "/ready", "/metrics"].contains(&route) {
        return None;
    }
    let trace = RequestTrace::begin(app.spans.as_ref(), request.headers())?;
    trace.set_name(format!("{} {route}", request.method()));
    trace.set("http.request.method", request.method().as_str());
    trace.set("http.route", route);
    trace.set("pellucid.request_id", id);
    Some(trace)
}

/// Enforces [`MAX_HEADER_BYTES`] exactly. The HTTP library only bounds its buffer, which grows in larger steps.
fn check_headers(request: &Request<Body>) -> Result<(), ApiError> {
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let lines = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len());
    if target + lines.sum::<usize>() <= MAX_HEADER_BYTES {
        return check_repeated(request);
    }
    let message = format!("the request's headers are larger than {MAX_HEADER_BYTES} bytes");
    Err(ApiError::refused(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message))
}

/// Refuses a second header where two would let a proxy and this server disagree on who sends a request to whom, and a
/// request of HTTP/1.1 without a host, as RFC 9112 demands.
fn check_repeated(request: &Request<Body>) -> Result<(), ApiError> {
    let has_host = request.headers().contains_key(header::HOST) || request.uri().host().is_some();
    if request.version() == Version::HTTP_11 && !has_host {
        let message = "a request of HTTP/1.1 needs the header host";
        return Err(ApiError::refused(StatusCode::BAD_REQUEST, "missing_host", message));
    }
    for name in [header::AUTHORIZATION, header::HOST, header::CONTENT_TYPE, HeaderName::from_static("x-api-key")] {
        if request.headers().get_all(&name).iter().nth(1).is_some() {
            let message = format!("the header {name} must not be repeated");
            return Err(ApiError::refused(StatusCode::BAD_REQUEST, "repeated_header", message));
        }
    }
    Ok(())
}

/// Returns the client's request id if it has at most 64 letters, digits and `-_.`, else a new one.
fn request_id(request: &Request<Body>) -> String {
    let is_plain = |id: &&str| {
        (1..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    let given = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(is_plain);
    given.map_or_else(|| random::id("req-"), str::to_owned)
}

fn unknown_route(app: &SharedApp, request: &Request<Body>, table: &RouteTable) -> Result<Response<Body>, ApiError> {
    // Model names may contain slashes, which the router takes for separators of the path.
    let id = request.uri().path().strip_prefix(MODELS).filter(|_| request.method() == Method::GET);
    if let (Some(id), Some(caller)) = (id, request.extensions().get::<Caller>()) {
        let card = ModelCard::find(id, app, &caller.tenant)?;
        return Ok(respond::json(serde_json::to_string(&card).unwrap_or_default()));
    }
    let path = request.uri().path();
    Err(not_offered(path).unwrap_or_else(|| table.unknown(request.method(), path)))
}

fn wrong_method(request: &Request<Body>, table: &RouteTable) -> ApiError {
    let path = request.uri().path();
    let route = request.extensions().get::<MatchedPath>().map_or(path, MatchedPath::as_str);
    table.wrong_method(request.method(), route, path)
}

/// Answers a request whose handler panicked; other requests go on. The panic hook has printed where it was.
fn internal_error(_: Box<dyn Any + Send + 'static>) -> Response<Body> {
    tracing::error!("a request handler panicked");
    ApiError::internal().into()
}

fn cors(origins: &[String]) -> CorsLayer {
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        // OpenAI's client in a browser sends a dozen headers of its own. No header gives a page more rights than its
        // origin.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, header::RETRY_AFTER])
        .max_age(Duration::from_secs(600))
}
