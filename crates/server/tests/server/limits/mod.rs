//! Limits: keys, memory, connections, requests, and attacks over the WebSocket.

mod access;
mod client_memory;
mod connections;
mod operators;
mod requests_in_flight;
mod websocket;
