//! OpenAI's Responses API: requests become chat requests, replies become responses of output items, and responses are
//! stored for each tenant so that later requests can continue them.

mod background;
mod conversation;
pub(crate) mod database;
mod event_log;
mod items;
mod output;
mod query;
mod request;
mod response;
pub(crate) mod routes;
mod schemas;
pub(crate) mod store;
mod stream;
mod tools;
