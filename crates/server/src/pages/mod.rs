//! Pages for people: `/` is the page for browsers, made from `web/`; `/overview` says what is served and how to call
//! it, `/docs` shows the OpenAPI document.
//!
//! `/overview` and `/docs` are written here, without scripts, fonts or images from elsewhere. All answer without a key
//! and tell no more than `/health` then: on a server with keys they name neither model nor version nor limits. Every
//! text that does not come from this folder is escaped.

pub(crate) mod base_url;
pub(crate) mod docs;
mod examples;
pub(crate) mod files;
pub(crate) mod home;
mod html;
mod schema_text;
