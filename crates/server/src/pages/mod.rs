//! Pages for people: `/` says what is served and how to call it, `/docs` shows the OpenAPI document.
//!
//! Both are written here, without scripts, fonts or images from elsewhere, and answer without a key. They tell no more
//! than `/health` then: on a server with keys they name neither model nor version nor limits. Every text that does not
//! come from this folder is escaped.

pub(crate) mod base_url;
pub(crate) mod docs;
mod examples;
pub(crate) mod home;
mod html;
mod schema_text;
