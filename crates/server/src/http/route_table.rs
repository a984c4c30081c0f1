//! The routes with their methods, for errors about requests that match none of them.

use axum::http::{Method, StatusCode};
use utoipa::openapi::OpenApi;

use super::error::ApiError;

/// Maximum characters of a client's path and method that an error quotes.
const MAX_SHOWN_PATH: usize = 128;
const MAX_SHOWN_METHOD: usize = 16;

/// Paths, as the router has them, each with its methods.
#[derive(Debug)]
pub(crate) struct RouteTable(Vec<(String, Vec<&'static str>)>);

impl RouteTable {
    /// Returns the routes of the OpenAPI document, and `pages`, which are not in it.
    pub(crate) fn new(api: &OpenApi, pages: &[&str]) -> RouteTable {
        let mut routes: Vec<(String, Vec<&'static str>)> = Vec::new();
        for (path, item) in &api.paths.paths {
            let methods =
                [("GET", item.get.is_some()), ("POST", item.post.is_some()), ("DELETE", item.delete.is_some())];
            routes.push((path.clone(), methods.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()));
        }
        routes.extend(pages.iter().map(|path| ((*path).to_owned(), vec!["GET"])));
        routes.sort();
        RouteTable(routes)
    }

    /// Returns the error for a path that is no route.
    pub(crate) fn unknown(&self, method: &Method, path: &str) -> ApiError {
        let asked = shown(method, path);
        let has: Vec<String> =
            self.0.iter().map(|(path, methods)| format!("{} {path}", methods.join(" and "))).collect();
        let has = has.join(", ");
        let message = match self.similar(path) {
            Some(similar) => format!("unknown route: {asked}; did you mean {similar}? This server has {has}"),
            None => format!("unknown route: {asked}; this server has {has}"),
        };
        ApiError::refused(StatusCode::NOT_FOUND, "unknown_route", message)
    }

    /// Returns the route that a client with a wrong base URL or a stray slash means.
    fn similar(&self, path: &str) -> Option<&str> {
        let path = path.trim_end_matches('/');
        let meant = [format!("/v1{path}"), path.replacen("/v1/v1/", "/v1/", 1), path.replacen("/v1/", "/", 1)];
        let routes = || self.0.iter().map(|(route, _)| route.as_str()).filter(|_| !path.is_empty());
        routes().find(|route| *route == path).or_else(|| routes().find(|route| meant.iter().any(|one| one == route)))
    }

    /// Returns the error for a method that a route does not have. `route` is its path in the router.
    pub(crate) fn wrong_method(&self, method: &Method, route: &str, path: &str) -> ApiError {
        let methods = self.0.iter().find(|(path, _)| path == route).map(|(_, methods)| methods.as_slice());
        // The router answers HEAD wherever it answers GET.
        let allowed = match methods.unwrap_or_default() {
            ["GET"] => "GET and HEAD".to_owned(),
            methods => methods.join(" and "),
        };
        let message = format!("{}: this route does not support the method; it has {allowed}", shown(method, path));
        ApiError::refused(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }
}

/// Returns a request's method and path as errors quote them: escaped and truncated.
fn shown(method: &Method, path: &str) -> String {
    let cut = |text: &str, max_len: usize| {
        let start: String = text.chars().take(max_len).collect();
        let rest = if start.len() < text.len() { "..." } else { "" };
        format!("{}{rest}", start.escape_debug())
    };
    format!("{} {}", cut(method.as_str(), MAX_SHOWN_METHOD), cut(path, MAX_SHOWN_PATH))
}
